# farandole_warnings: what every target of the project is compiled with.
add_library(farandole_warnings INTERFACE)
target_compile_options(farandole_warnings INTERFACE
  -Wall -Wextra -Wnon-virtual-dtor -Woverloaded-virtual -Wno-unused-parameter
  $<$<BOOL:${FARANDOLE_WERROR}>:-Werror>)
