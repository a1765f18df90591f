# The build on a GPU machine without package registries: build/gpu, from a kit (./dev gpu-kit) and the machine's own tools.

# build_from_kit KIT: sets BUILD, GPU_PYTHON and CTEST, and puts build and kit on PYTHONPATH.
build_from_kit() {
  local kit tool site
  kit=$(cd -- "$1" && pwd)
  for tool in "$HAVE_PYTHON" cmake ctest ninja g++; do
    command -v "$tool" >/dev/null || die "test-gpu: '$tool' is missing: a kit needs Python with its headers, CMake 3.25, ninja and g++"
  done
  GPU_PYTHON=$(command -v "$HAVE_PYTHON")
  CTEST=ctest
  # The machine's Python may have plugins of pytest, for another version of it.
  export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTEST_PLUGINS=pytest_timeout
  # Nor has every such machine an address that gloo finds by the host's name.
  export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
  has_python_header || die "test-gpu: $GPU_PYTHON has no Python.h"
  BUILD=$ROOT/build/gpu
  site=$BUILD/site
  lock
  step "unpack ${kit#"$ROOT"/}" gpu-unpack.log "$GPU_PYTHON" "$ROOT/.ci/gpu_kit.py" unpack "$kit" "$site"
  export PYTHONPATH=$BUILD/python:$site${PYTHONPATH:+:$PYTHONPATH}
  step "configure build/gpu" gpu-configure.log configure_from_kit "$kit"
  step "build build/gpu" gpu-build.log \
    cmake --build "$BUILD" --parallel "$(build_jobs)" --target farandole_python farandole_gpu_tests
  step "link build/gpu" gpu-link.log "$GPU_PYTHON" "$ROOT/.ci/link_package.py" "$BUILD/python" "$BUILD/python"
  unlock
}

# The headers of NCCL and CUDA are those of the wheels that this torch came with, wherever they are installed; else FindNCCL
# looks for a toolkit.
configure_from_kit() {
  local kit=$1 headers
  mapfile -t headers < <("$GPU_PYTHON" -c '
import importlib.util, pathlib
found = importlib.util.find_spec("nvidia")
for folder in map(pathlib.Path, found.submodule_search_locations if found else []):
    for name, pattern in ("NCCL_INCLUDE_DIR", "nccl/include/nccl.h"), ("NCCL_CUDA_INCLUDE_DIR", "cu*/include/cuda_runtime_api.h"):
        for header in folder.glob(pattern):
            print(f"-D{name}={header.parent}")')
  cmake -S "$ROOT" -B "$BUILD" -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython3_EXECUTABLE="$GPU_PYTHON" \
    -DBoost_DIR="$kit/cmake" -DGTest_DIR="$kit/cmake" -DCMAKE_CXX_FLAGS="-isystem $kit/cuda" -DFARANDOLE_CUDA=ON "${headers[@]}"
}
