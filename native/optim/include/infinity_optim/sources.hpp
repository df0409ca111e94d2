// The text that this library was compiled from, for NVRTC: what runs on the GPU cannot differ from
// it.
#pragma once

#include <map>
#include <string_view>

namespace infinity_optim {

// The headers of shared/ by the names they include each other under, and "kernels.cu".
[[nodiscard]] std::map<std::string_view, std::string_view> sources();

}  // namespace infinity_optim
