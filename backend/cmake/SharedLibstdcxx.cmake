# torch hands streams, strings and exceptions from library to library, so all must use the libstdc++ that the process has.
# A compiler whose libstdc++.so is missing links libstdc++.a instead without a word. With GCC 13's in a process that has
# GCC 14's, the first number that was written to a stream crashed: each has its own list of what a locale holds.
if(FARANDOLE_TORCH)
  set(farandole_stream "#include <sstream>\nint main() { return std::ostringstream().str().empty() ? 0 : 1; }\n")
  set(farandole_program ${CMAKE_CURRENT_BINARY_DIR}/CMakeFiles/shared_libstdcxx)
  try_compile(farandole_links SOURCE_FROM_VAR shared_libstdcxx.cc farandole_stream NO_CACHE
    OUTPUT_VARIABLE farandole_output COPY_FILE ${farandole_program})
  if(NOT farandole_links)
    message(FATAL_ERROR "${CMAKE_CXX_COMPILER} cannot link a program that uses libstdc++:\n${farandole_output}")
  endif()
  file(STRINGS ${farandole_program} farandole_needed REGEX "^libstdc\\+\\+\\.so")
  if(NOT farandole_needed)
    message(FATAL_ERROR "${CMAKE_CXX_COMPILER} links libstdc++ statically: expected a compiler that links libstdc++.so.6, "
      "which torch uses. CXX=PATH in the environment of a new build folder names another one.")
  endif()
endif()
