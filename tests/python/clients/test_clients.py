"""torch's own clients of c10d run unchanged over farandole, and give what they give over gloo."""

import pytest

from clients.comparison import compare_backends

FUNCTIONS = ["autograd_functions", "functional_collectives", "objects"]


def test_torch_ddp_with_hooks_static_graphs_unused_parameters_and_join(tmp_path):
    compare_backends("clients.data_parallel_programs", ["ddp", "ddp_hooks", "ddp_graphs"], tmp_path, tolerance=1e-5)


def test_sharded_parameters_optimizer_states_and_checkpoints(tmp_path):
    programs = ["zero_optimizer", "fsdp", "checkpoint"]
    compare_backends("clients.data_parallel_programs", programs, tmp_path, tolerance=1e-5)


def test_tensor_parallelism_and_redistributed_dtensors(tmp_path):
    compare_backends("clients.model_parallel_programs", ["tensor_parallel", "dtensor"], tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_sharded_tensors_come_together_where_they_lie(tmp_path):
    compare_backends("clients.model_parallel_programs", ["sharded_tensor"], tmp_path)


def test_every_schedule_of_torch_pipelining(tmp_path):
    compare_backends("clients.model_parallel_programs", ["pipelines"], tmp_path)


def test_collectives_as_functions_in_autograd_and_of_objects(tmp_path):
    compare_backends("clients.function_programs", FUNCTIONS, tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_collectives_in_a_compiled_graph(tmp_path):
    compare_backends("clients.function_programs", ["compiled"], tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_collectives_in_compiled_code(tmp_path):
    compare_backends("clients.function_programs", ["compiled_to_code"], tmp_path, timeout=200)


def test_the_detailed_debug_level_wraps_the_backend_and_finds_mismatches(tmp_path):
    programs = ["checked_clients", "checked"]
    compare_backends("clients.function_programs", programs, tmp_path, is_checked=True)


def test_hybrid_shards_mixed_precision_and_checkpoints_that_are_resharded(tmp_path):
    programs = ["hybrid_shards", "resharded_checkpoint"]
    compare_backends("clients.four_rank_programs", programs, tmp_path, world_size=4, tolerance=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_uneven_exchanges_in_autograd_newer_names_and_graphs_on_a_part_of_the_world(tmp_path):
    programs = ["uneven_autograd", "newer_names", "compiled_on_a_part"]
    compare_backends("clients.four_rank_programs", programs, tmp_path, world_size=4)


def test_groups_made_by_their_members_in_another_order_and_objects_between_their_ranks(tmp_path):
    programs = ["made_by_members", "in_another_order", "subgroups", "objects_between", "gathered_at_one"]
    compare_backends("clients.group_programs", programs, tmp_path, world_size=4)


@pytest.mark.filterwarnings("ignore")
def test_whole_accumulated_and_otherwise_cut_parameters_of_fsdp(tmp_path):
    programs = ["fsdp_kept_whole", "fsdp_accumulated"]
    compare_backends("clients.shard_programs", programs, tmp_path, world_size=4, tolerance=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_checkpoints_that_a_process_writes_and_states_given_by_rank_0(tmp_path):
    compare_backends("clients.shard_programs", ["checkpoint_by_a_process"], tmp_path, tolerance=1e-5)
