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
  has_python_header || die "test-gpu: $GPU_PYTHON has no Python.h"
  BUILD=$ROOT/build/gpu
  site=$BUILD/site
  lock
  step "unpack ${kit#"$ROOT"/}" gpu-unpack.log "$GPU_PYTHON" "$ROOT/.ci/gpu_kit.py" unpack "$kit" "$site"
  export PYTHONPATH=$BUILD/python:$site
  step "configure build/gpu" gpu-configure.log configure_from_kit "$kit"
  step "build build/gpu" gpu-build.log \
    cmake --build "$BUILD" --parallel "$(build_jobs)" --target farandole_python farandole_gpu_tests
  step "link build/gpu" gpu-link.log "$GPU_PYTHON" "$ROOT/.ci/link_package.py" "$BUILD/python" "$BUILD/python"
  unlock
}

# NCCL's headers are looked for beside the nvidia packages that this Python has, wherever torch is installed.
configure_from_kit() {
  local kit=$1 nccl
  nccl=$("$GPU_PYTHON" -c '
import importlib.util
found = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
print(next(iter(found.submodule_search_locations), "") if found else "")')
  cmake -S "$ROOT" -B "$BUILD" -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython3_EXECUTABLE="$GPU_PYTHON" \
    -DBoost_DIR="$kit/cmake" -DGTest_DIR="$kit/cmake" -DCMAKE_CXX_FLAGS="-isystem $kit/cuda" -DFARANDOLE_CUDA=ON \
    ${nccl:+-DNCCL_INCLUDE_DIR="$nccl/include"}
}
