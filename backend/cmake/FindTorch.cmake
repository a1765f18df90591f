# Finds torch by asking the interpreter. Torch's own package file demands a CUDA
# toolkit as soon as torch is a CUDA wheel; this needs none.
#
# Torch::Torch    headers and libtorch, libtorch_cpu, libc10
# Torch::Python   what a Python extension needs on top: libtorch_python, pybind11 (torch's copy), Python's headers
# Torch::CUDA     libtorch_cuda and libc10_cuda, where torch was built for CUDA; the headers of CUDA are NCCL::Headers'
# Torch_VERSION   e.g. 2.15.0
# Torch_CUDA      ON when torch was built for CUDA
execute_process(  # without torch's plugins, an installed farandole among them, of which one may be broken
  COMMAND ${CMAKE_COMMAND} -E env TORCH_DEVICE_BACKEND_AUTOLOAD=0 ${Python3_EXECUTABLE} -c
"import torch, pathlib
root = pathlib.Path(torch.__file__).parent
print(torch.__version__.split('+')[0], root, torch.version.cuda or 'OFF', int(torch._C._GLIBCXX_USE_CXX11_ABI), sep=';')"
  OUTPUT_VARIABLE _torch OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_VARIABLE _torch_error RESULT_VARIABLE _torch_rc)
if(_torch_rc EQUAL 0)
  list(GET _torch 0 Torch_VERSION)
  list(GET _torch 1 Torch_ROOT)
  list(GET _torch 2 Torch_CUDA)
  list(GET _torch 3 _torch_abi)
else()
  message(STATUS "${Python3_EXECUTABLE} cannot import torch: ${_torch_error}")
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Torch REQUIRED_VARS Torch_ROOT VERSION_VAR Torch_VERSION)

if(Torch_FOUND AND Torch_VERSION VERSION_LESS 2.11)
  message(FATAL_ERROR "torch ${Torch_VERSION} in ${Torch_ROOT}: farandole needs 2.11 to 2.15")
endif()
if(Torch_FOUND AND NOT TARGET Torch::Torch)
  add_library(Torch::Torch INTERFACE IMPORTED)
  target_include_directories(Torch::Torch SYSTEM INTERFACE
    ${Torch_ROOT}/include ${Torch_ROOT}/include/torch/csrc/api/include)
  target_compile_definitions(Torch::Torch INTERFACE
    _GLIBCXX_USE_CXX11_ABI=${_torch_abi} USE_DISTRIBUTED USE_C10D_GLOO)
  target_link_directories(Torch::Torch INTERFACE ${Torch_ROOT}/lib)
  target_link_libraries(Torch::Torch INTERFACE torch torch_cpu c10)
  if(Torch_CUDA)
    add_library(Torch::CUDA INTERFACE IMPORTED)
    target_link_libraries(Torch::CUDA INTERFACE Torch::Torch torch_cuda c10_cuda)
  endif()
  add_library(Torch::Python INTERFACE IMPORTED)
  target_link_libraries(Torch::Python INTERFACE Torch::Torch torch_python Python3::Module)
endif()
