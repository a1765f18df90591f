# farandole_warnings: what every target of the project is compiled with. GCC 12's
# -Wrestrict is wrong about "text" + std::to_string(x).
add_library(farandole_warnings INTERFACE)
target_compile_options(farandole_warnings INTERFACE
  -Wall -Wextra -Wnon-virtual-dtor -Woverloaded-virtual -Wno-unused-parameter -Wno-restrict
  $<$<BOOL:${FARANDOLE_WERROR}>:-Werror>)
