# farandole_layer(NAME [TORCH] SOURCES file... [DEPENDS target...])
#
# One layer of the project: a static library `farandole_NAME`. Includes are
# written from the top of the source tree ("backend/common/status.h"). With
# TORCH the layer includes torch and shares one precompiled header with the
# other torch layers: a file that includes c10d takes 10 s without it, 3 with.
function(farandole_layer name)
  cmake_parse_arguments(ARG "TORCH" "" "SOURCES;DEPENDS" ${ARGN})
  set(target farandole_${name})
  add_library(${target} STATIC ${ARG_SOURCES})
  target_include_directories(${target} PUBLIC ${PROJECT_SOURCE_DIR})
  target_link_libraries(${target} PUBLIC ${ARG_DEPENDS} Threads::Threads PRIVATE farandole_warnings)
  if(ARG_TORCH)
    target_link_libraries(${target} PUBLIC Torch::Torch)
    farandole_torch_pch(${target})
  endif()
endfunction()

# Gives `target` the precompiled header that all torch targets share.
function(farandole_torch_pch target)
  if(NOT TARGET farandole_torch_pch)
    file(WRITE ${CMAKE_BINARY_DIR}/torch_pch.cc "// The translation unit that owns the shared precompiled header.\n")
    add_library(farandole_torch_pch STATIC ${CMAKE_BINARY_DIR}/torch_pch.cc)
    target_link_libraries(farandole_torch_pch PUBLIC Torch::Torch Threads::Threads)
    target_precompile_headers(farandole_torch_pch PRIVATE
      <ATen/ATen.h> <torch/csrc/distributed/c10d/Backend.hpp> <torch/csrc/distributed/c10d/ProcessGroup.hpp>
      <torch/csrc/autograd/engine.h>)
  endif()
  target_precompile_headers(${target} REUSE_FROM farandole_torch_pch)
endfunction()
