// Blocks times rows rounded to int8, which take half of the compile time.

#include "linear.h"

namespace forge {

template void run_linear_alone<Format::kRounded4>(const Linear&);
template void run_linear<Format::kRounded8>(xla::ffi::ThreadPool&, const Linear&);
template void run_linear<Format::kRounded6>(xla::ffi::ThreadPool&, const Linear&);
template void run_linear<Format::kRounded4>(xla::ffi::ThreadPool&, const Linear&);
template void run_linear<Format::kRoundedIq4>(xla::ffi::ThreadPool&, const Linear&);

}  // namespace forge
