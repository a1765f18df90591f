#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace farandole {

// The beginning of a UTF-8 text, `maxBytes` at most: a character that would be cut in two is left out, which Python
// could not read.
std::string_view cutText(std::string_view text, std::size_t maxBytes);

// Two digits for each byte.
std::string hexText(std::string_view bytes);

}  // namespace farandole
