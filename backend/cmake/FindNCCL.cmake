# Finds the headers of NCCL and CUDA: in torch's own wheels (nvidia-nccl-cu*,
# nvidia-cuda-runtime), else in a toolkit. Only headers: the libraries are
# loaded at run time from the copies that torch has loaded.
#
# NCCL::Headers  interface target;  NCCL_VERSION  e.g. 2.30.7
if(FARANDOLE_CUDA STREQUAL "OFF")
  set(NCCL_FOUND FALSE)
  return()
elseif(NOT FARANDOLE_CUDA MATCHES "^(AUTO|ON)$")
  message(FATAL_ERROR "FARANDOLE_CUDA=${FARANDOLE_CUDA}: expected AUTO, ON or OFF")
endif()
execute_process(
  COMMAND ${Python3_EXECUTABLE} -c "import sysconfig; print(sysconfig.get_paths()['platlib'])"
  OUTPUT_VARIABLE _site OUTPUT_STRIP_TRAILING_WHITESPACE)
find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${_site}/nvidia/nccl/include /usr/local/cuda/include)
file(GLOB _cuda_wheels ${_site}/nvidia/cu*/include ${_site}/nvidia/cuda_runtime/include)
find_path(NCCL_CUDA_INCLUDE_DIR cuda_runtime_api.h HINTS ${_cuda_wheels} /usr/local/cuda/include)
mark_as_advanced(NCCL_INCLUDE_DIR NCCL_CUDA_INCLUDE_DIR)
if(NCCL_INCLUDE_DIR)
  file(STRINGS ${NCCL_INCLUDE_DIR}/nccl.h _nccl_version REGEX "define NCCL_(MAJOR|MINOR|PATCH) ")
  string(REGEX MATCHALL "[0-9]+" _nccl_version "${_nccl_version}")
  list(JOIN _nccl_version "." NCCL_VERSION)
endif()

# torch's wheels of CUDA 13 lack crt/host_config.h and nv/target, which cuda_runtime.h and cuda_fp16.h include.
if(NCCL_INCLUDE_DIR AND NCCL_CUDA_INCLUDE_DIR)
  include(CheckCXXSourceCompiles)
  set(CMAKE_REQUIRED_INCLUDES ${NCCL_INCLUDE_DIR} ${NCCL_CUDA_INCLUDE_DIR})
  check_cxx_source_compiles("#include <nccl.h>\nint main() { return 0; }" NCCL_HEADERS_COMPILE)
  unset(CMAKE_REQUIRED_INCLUDES)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  NCCL
  REQUIRED_VARS NCCL_INCLUDE_DIR NCCL_CUDA_INCLUDE_DIR NCCL_HEADERS_COMPILE
  VERSION_VAR NCCL_VERSION
  REASON_FAILURE_MESSAGE
    "nccl.h and cuda_runtime_api.h are needed, crt/host_config.h and nv/target: in a CUDA toolkit or the wheels nvidia-cuda-crt and nvidia-cuda-cccl")
if(FARANDOLE_CUDA STREQUAL "ON" AND NOT NCCL_FOUND)
  message(FATAL_ERROR "FARANDOLE_CUDA=ON, but the headers of NCCL and CUDA were not found or do not compile: "
                      "they are in torch's wheels, nvidia-cuda-crt and nvidia-cuda-cccl, or in a CUDA toolkit")
endif()
if(NCCL_FOUND AND NOT TARGET NCCL::Headers)
  add_library(NCCL::Headers INTERFACE IMPORTED)
  target_include_directories(NCCL::Headers SYSTEM INTERFACE ${NCCL_INCLUDE_DIR} ${NCCL_CUDA_INCLUDE_DIR})
endif()
