# Finds UCX: the libucx-cu13 (or -cu12) wheel of the Python in use, or the
# system's when FARANDOLE_UCX=SYSTEM. Both have the same SONAMEs; whichever the
# process loads first wins, which the backend checks when it starts.
#
# UCX::UCX      headers, libucp, libucs
# UCX_VERSION   e.g. 1.22.0
# UCX_PERFTEST  the ucx_perftest program, when it is there
if(FARANDOLE_UCX STREQUAL "WHEEL")
  execute_process(
    COMMAND ${Python3_EXECUTABLE} -c
      "import importlib.util, pathlib; print(pathlib.Path(importlib.util.find_spec('libucx').origin).parent)"
    OUTPUT_VARIABLE UCX_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE _ucx_rc)
  if(NOT _ucx_rc EQUAL 0)
    unset(UCX_ROOT)
    message(STATUS "No libucx wheel in ${Python3_EXECUTABLE}: pip install libucx-cu13, or set FARANDOLE_UCX=SYSTEM")
  endif()
  set(_ucx_find PATHS ${UCX_ROOT} NO_DEFAULT_PATH)
elseif(FARANDOLE_UCX STREQUAL "SYSTEM")
  set(_ucx_find HINTS ${UCX_ROOT} ENV UCX_ROOT)
else()
  message(FATAL_ERROR "FARANDOLE_UCX=${FARANDOLE_UCX}: expected WHEEL or SYSTEM")
endif()
find_path(UCX_INCLUDE_DIR ucp/api/ucp.h ${_ucx_find} PATH_SUFFIXES include)
find_library(UCX_UCP_LIBRARY NAMES ucp libucp.so.0 ${_ucx_find} PATH_SUFFIXES lib)
find_library(UCX_UCS_LIBRARY NAMES ucs libucs.so.0 ${_ucx_find} PATH_SUFFIXES lib)
find_program(UCX_PERFTEST ucx_perftest ${_ucx_find} PATH_SUFFIXES bin)
mark_as_advanced(UCX_INCLUDE_DIR UCX_UCP_LIBRARY UCX_UCS_LIBRARY UCX_PERFTEST)
if(UCX_INCLUDE_DIR)
  file(STRINGS ${UCX_INCLUDE_DIR}/ucp/api/ucp_version.h _ucx_version REGEX "define UCP_API_(MAJOR|MINOR)")
  string(REGEX MATCHALL "[0-9]+" _ucx_version "${_ucx_version}")
  list(JOIN _ucx_version "." UCX_VERSION)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(UCX REQUIRED_VARS UCX_UCP_LIBRARY UCX_UCS_LIBRARY UCX_INCLUDE_DIR
                                  VERSION_VAR UCX_VERSION)
if(UCX_FOUND AND NOT TARGET UCX::UCX)
  add_library(UCX::UCX INTERFACE IMPORTED)
  target_include_directories(UCX::UCX SYSTEM INTERFACE ${UCX_INCLUDE_DIR})
  target_link_libraries(UCX::UCX INTERFACE ${UCX_UCP_LIBRARY} ${UCX_UCS_LIBRARY})
endif()
