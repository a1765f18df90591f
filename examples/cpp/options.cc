#include "examples/cpp/options.h"

#include <c10/util/Exception.h>

#include <charconv>

namespace example {

namespace {

template <typename Number>
Number parseNumber(const std::string& name, const std::string& text, Number least) {
  Number value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  TORCH_CHECK_VALUE(error == std::errc() && end == text.data() + text.size() && value >= least, name, " is '", text,
                    "', expected a number of at least ", least);
  return value;
}

}  // namespace

Options parseOptions(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i];
    TORCH_CHECK_VALUE(i + 1 < argc, name, " has no value, expected one after it");
    const std::string value = argv[i + 1];
    if (name == "--schedule") {
      options.schedule = value;
    } else if (name == "--stages") {
      options.stages = parseNumber(name, value, 0);
    } else if (name == "--microbatches") {
      options.microbatches = parseNumber(name, value, 1);
    } else if (name == "--steps") {
      options.steps = parseNumber(name, value, 1);
    } else if (name == "--tolerance") {
      options.tolerance = parseNumber(name, value, 0.0);
    } else {
      TORCH_CHECK_VALUE(false, "unknown option ", name,
                        ", expected --schedule, --stages, --microbatches, --steps or --tolerance");
    }
  }
  return options;
}

}  // namespace example
