// The strongest of each row's values, the others at 0: what the launch reads and writes.
#pragma once

#include <cstdint>

namespace twell::strongest {

// hidden, left: [rows, columns], values of 16 bits, columns a multiple of eight, rows at addresses of 16 bytes. A value
// fires if the bits of its size are more than `least`. Of a row's firings those stay that are no less than the one in
// place `share` of them, rounded up.
void launch(const void* hidden, void* left, int64_t rows, int columns, float share, int least, void* stream);

}  // namespace twell::strongest
