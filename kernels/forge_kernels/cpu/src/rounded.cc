// Blocks times rows rounded to int8: half of what there is to compile.

#include "linear.h"

namespace forge {

template void run_linear<Format::kRounded8>(xla::ffi::ThreadPool&, const Linear&);
template void run_linear<Format::kRounded4>(xla::ffi::ThreadPool&, const Linear&);

}  // namespace forge
