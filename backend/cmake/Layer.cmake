# farandole_layer(NAME [TORCH|TORCH_API] SOURCES file... [DEPENDS target...])
#
# One layer of the project: a static library `farandole_NAME`. Includes are
# written from the top of the source tree ("backend/common/status.h"). With
# TORCH the layer includes torch and shares one precompiled header with the
# other torch layers: a file that includes c10d takes 10 s without it, 3 with.
# TORCH_API is for what includes all of <torch/torch.h>: 16 s without one.
function(farandole_layer name)
  cmake_parse_arguments(ARG "TORCH;TORCH_API" "" "SOURCES;DEPENDS" ${ARGN})
  set(target farandole_${name})
  add_library(${target} STATIC ${ARG_SOURCES})
  target_include_directories(${target} PUBLIC ${PROJECT_SOURCE_DIR})
  target_link_libraries(${target} PUBLIC ${ARG_DEPENDS} Threads::Threads PRIVATE farandole_warnings)
  if(ARG_TORCH OR ARG_TORCH_API)
    target_link_libraries(${target} PUBLIC Torch::Torch)
  endif()
  if(ARG_TORCH)
    farandole_pch(${target} torch)
  elseif(ARG_TORCH_API)
    farandole_pch(${target} torch_api)
  endif()
endfunction()

# farandole_pch(TARGET KIND): gives `target` the precompiled header that all targets of
# this kind share: torch or torch_api. What is free of torch has none, so that ccache has
# it for the next version of torch.
function(farandole_pch target kind)
  set(owner farandole_${kind}_pch)
  if(NOT TARGET ${owner})
    set(torch <ATen/ATen.h> <torch/csrc/distributed/c10d/Backend.hpp> <torch/csrc/distributed/c10d/ProcessGroup.hpp>
        <torch/csrc/autograd/engine.h>)
    set(torch_api ${torch} <torch/torch.h>)
    file(WRITE ${CMAKE_BINARY_DIR}/${kind}_pch.cc "// The translation unit that owns a shared precompiled header.\n")
    add_library(${owner} STATIC ${CMAKE_BINARY_DIR}/${kind}_pch.cc)
    target_link_libraries(${owner} PUBLIC Torch::Torch Threads::Threads)
    target_precompile_headers(${owner} PRIVATE ${${kind}})
  endif()
  target_compile_options(${target} PRIVATE -fPIC)  # as the header was compiled, in programs too
  target_precompile_headers(${target} REUSE_FROM ${owner})
endfunction()
