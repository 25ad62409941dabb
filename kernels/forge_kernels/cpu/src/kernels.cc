// The handlers that XLA calls. They do not repeat the Python side's checks of shapes.

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <chrono>
#include <cstdint>
#include <limits>
#include <vector>

#include "attention.h"
#include "experts.h"
#include "linear.h"
#include "lora.h"
#include "pack.h"
#include "read.h"
#include "sampling.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using BF16 = ffi::Buffer<ffi::BF16>;
using I32 = ffi::Buffer<ffi::S32>;

const uint16_t* bits(const BF16& buffer) {
  return reinterpret_cast<const uint16_t*>(buffer.untyped_data());
}
uint16_t* bits(ffi::Result<BF16>& buffer) {
  return reinterpret_cast<uint16_t*>(buffer->untyped_data());
}

// x, norm weight, packed weight, scales, residual, num_rows -> y. `norm` and `residual` are empty if
// they are not used.
ffi::Error linear(ffi::ThreadPool pool, BF16 x, BF16 norm, ffi::AnyBuffer w, ffi::AnyBuffer scale,
                  BF16 residual, I32 num_rows, ffi::Result<ffi::AnyBuffer> y, int64_t format,
                  int64_t epilogue, int64_t columns, float eps, int64_t block, int64_t group,
                  int64_t minima) {
  forge::Linear op;
  op.x = bits(x);
  op.norm = norm.element_count() ? bits(norm) : nullptr;
  op.eps = eps;
  op.w = w.untyped_data();
  op.scale = static_cast<const float*>(scale.untyped_data());
  op.scale16 = static_cast<const uint16_t*>(scale.untyped_data());
  op.residual = bits(residual);
  bool wide = y->element_type() == ffi::F32;
  op.y32 = wide ? static_cast<float*>(y->untyped_data()) : nullptr;
  op.y16 = wide ? nullptr : static_cast<uint16_t*>(y->untyped_data());
  op.rows = std::min<long>(num_rows.typed_data()[0], x.dimensions()[0]);
  op.K = op.x_stride = x.dimensions()[1];
  op.N = columns;
  op.epilogue = static_cast<forge::Epilogue>(epilogue);
  op.blocks = {block, group, minima != 0};
  op.in_tiles =
      forge::uses_tiles(static_cast<forge::Format>(format), x.dimensions()[0], op.rows);
  switch (static_cast<forge::Format>(format)) {
    case forge::Format::kBf16: forge::run_linear<forge::Format::kBf16>(pool, op); break;
    case forge::Format::kInt8: forge::run_linear<forge::Format::kInt8>(pool, op); break;
    case forge::Format::kInt4: forge::run_linear<forge::Format::kInt4>(pool, op); break;
    case forge::Format::kBlocks8: forge::run_linear<forge::Format::kBlocks8>(pool, op); break;
    case forge::Format::kBlocks6: forge::run_linear<forge::Format::kBlocks6>(pool, op); break;
    case forge::Format::kBlocks4: forge::run_linear<forge::Format::kBlocks4>(pool, op); break;
    case forge::Format::kBlocksIq4: forge::run_linear<forge::Format::kBlocksIq4>(pool, op); break;
    case forge::Format::kRounded8: forge::run_linear<forge::Format::kRounded8>(pool, op); break;
    case forge::Format::kRounded6: forge::run_linear<forge::Format::kRounded6>(pool, op); break;
    case forge::Format::kRounded4: forge::run_linear<forge::Format::kRounded4>(pool, op); break;
    case forge::Format::kRoundedIq4: forge::run_linear<forge::Format::kRoundedIq4>(pool, op); break;
  }
  return ffi::Error::Success();
}

template <forge::Format format>
void run_experts_in_blocks(ffi::ThreadPool& pool, const forge::Experts& op, forge::Format down) {
  switch (down) {
    case forge::Format::kBlocks8:
      forge::run_experts<format, forge::Format::kBlocks8>(pool, op);
      break;
    case forge::Format::kBlocks6:
      forge::run_experts<format, forge::Format::kBlocks6>(pool, op);
      break;
    case forge::Format::kBlocks4:
      forge::run_experts<format, forge::Format::kBlocks4>(pool, op);
      break;
    case forge::Format::kBlocksIq4:
      forge::run_experts<format, forge::Format::kBlocksIq4>(pool, op);
      break;
    default: break;  // excluded by the caller
  }
}

ffi::Error experts(ffi::ThreadPool pool, BF16 x, ffi::AnyBuffer gate_up, ffi::AnyBuffer gate_up_scale,
                   ffi::AnyBuffer down, ffi::AnyBuffer down_scale, I32 chosen,
                   ffi::Buffer<ffi::F32> weights, I32 order, I32 num_rows, ffi::Result<BF16> y,
                   int64_t format, int64_t block, int64_t group, int64_t minima,
                   int64_t down_format, int64_t down_block, int64_t down_group,
                   int64_t down_minima, int64_t inner) {
  long d = x.dimensions()[1];
  forge::Experts op;
  op.x = bits(x);
  op.gate_up = {gate_up.untyped_data(), gate_up_scale.untyped_data(), 2 * inner, d,
                {block, group, minima != 0}};
  op.down = {down.untyped_data(), down_scale.untyped_data(), d, inner,
             {down_block, down_group, down_minima != 0}};
  op.chosen = chosen.typed_data();
  op.weights = weights.typed_data();
  op.order = order.element_count() ? order.typed_data() : nullptr;
  op.y = bits(y);
  op.rows = std::min<long>(num_rows.typed_data()[0], x.dimensions()[0]);
  op.per_token = chosen.dimensions()[1];
  op.count = gate_up.dimensions()[0];
  forge::Format up = static_cast<forge::Format>(format);
  forge::Format then = static_cast<forge::Format>(down_format);
  op.shape = x.dimensions()[0];
  bool known = up == then || (forge::in_blocks(up) && forge::in_blocks(then));
  if (!known) return ffi::Error(ffi::ErrorCode::kInternal, "experts in formats that do not mix");
  switch (up) {
    case forge::Format::kBf16: forge::run_experts<forge::Format::kBf16>(pool, op); break;
    case forge::Format::kInt8: forge::run_experts<forge::Format::kInt8>(pool, op); break;
    case forge::Format::kInt4: forge::run_experts<forge::Format::kInt4>(pool, op); break;
    case forge::Format::kBlocks8:
      run_experts_in_blocks<forge::Format::kBlocks8>(pool, op, then);
      break;
    case forge::Format::kBlocks6:
      run_experts_in_blocks<forge::Format::kBlocks6>(pool, op, then);
      break;
    case forge::Format::kBlocks4:
      run_experts_in_blocks<forge::Format::kBlocks4>(pool, op, then);
      break;
    case forge::Format::kBlocksIq4:
      run_experts_in_blocks<forge::Format::kBlocksIq4>(pool, op, then);
      break;
    default: return ffi::Error(ffi::ErrorCode::kInternal, "experts on rows that are rounded");
  }
  return ffi::Error::Success();
}

// `a` and `b` have all layers' adapters.
ffi::Error lora(ffi::ThreadPool pool, BF16 x, ffi::Buffer<ffi::U16> a, ffi::Buffer<ffi::U16> b,
                I32 place, I32 num_rows, ffi::Result<BF16> y, int64_t layer, int64_t rank) {
  forge::Lora op;
  op.x = bits(x);
  op.shape = x.dimensions()[0];
  op.rows = std::min<long>(num_rows.typed_data()[0], op.shape);
  op.K = x.dimensions()[1];
  op.N = y->dimensions()[1];
  op.rank = rank;
  op.places = a.dimensions()[1];
  auto of_layer = [&](const ffi::Buffer<ffi::U16>& stack) {
    return static_cast<const uint8_t*>(stack.untyped_data()) +
           layer * (stack.size_bytes() / stack.dimensions()[0]);
  };
  op.a = of_layer(a);
  op.b = of_layer(b);
  op.place = place.typed_data();
  op.y = bits(y);
  forge::run_lora(pool, op);
  return ffi::Error::Success();
}

// `scale` is empty for a cache of 16 bits. A window or soft cap of 0 means none.
ffi::Error attention(ffi::ThreadPool pool, BF16 q, ffi::AnyBuffer kv, ffi::Buffer<ffi::F32> scale,
                     I32 block_tables, I32 kv_lens, I32 cu_q_lens, I32 num_seqs,
                     ffi::Buffer<ffi::F32> sinks, ffi::Result<BF16> out, float sm_scale, int64_t window, float soft_cap) {
  forge::Attention op;
  op.q = bits(q);
  op.kv = kv.untyped_data();
  op.scale = scale.element_count() ? scale.typed_data() : nullptr;
  bool is_int8 = kv.element_type() == ffi::DataType::S8;
  op.type = !op.scale ? forge::KVType::kBf16 : is_int8 ? forge::KVType::kInt8 : forge::KVType::kFp8;
  op.block_tables = block_tables.typed_data();
  op.kv_lens = kv_lens.typed_data();
  op.cu_q_lens = cu_q_lens.typed_data();
  op.sinks = sinks.element_count() ? sinks.typed_data() : nullptr;
  op.out = bits(out);
  op.num_seqs = std::min<long>(num_seqs.typed_data()[0], kv_lens.dimensions()[0]);
  op.max_blocks = block_tables.dimensions()[1];
  op.heads = q.dimensions()[1];
  op.head_dim = q.dimensions()[2];
  op.kv_heads = kv.dimensions()[2];
  op.block_size = kv.dimensions()[3];
  op.sm_scale = sm_scale;
  op.window = window ? long(window) : std::numeric_limits<long>::max();
  op.soft_cap = soft_cap;
  forge::run_attention(pool, op);
  return ffi::Error::Success();
}

// Writes the cache in place: the result `kv_out` is the same memory as `kv`.
ffi::Error rotate_write(ffi::ThreadPool pool, BF16 qkv, ffi::Buffer<ffi::F32> cos,
                        ffi::Buffer<ffi::F32> sin, I32 slot_mapping, I32 num_tokens,
                        ffi::Buffer<ffi::U16> kv, ffi::Result<BF16> q,
                        ffi::Result<ffi::Buffer<ffi::U16>> kv_out, bool interleaved) {
  if (kv.typed_data() != kv_out->typed_data())
    return ffi::Error(ffi::ErrorCode::kInternal, "the KV cache was not passed in place");
  forge::RotateWrite op;
  op.qkv = bits(qkv);
  op.cos = cos.typed_data();
  op.sin = sin.typed_data();
  op.slot_mapping = slot_mapping.typed_data();
  op.q = bits(q);
  op.kv = kv_out->typed_data();
  op.tokens = std::min<long>(num_tokens.typed_data()[0], qkv.dimensions()[0]);
  op.num_blocks = kv.dimensions()[0];
  op.heads = q->dimensions()[1];
  op.head_dim = q->dimensions()[2];
  op.kv_heads = kv.dimensions()[2];
  op.block_size = kv.dimensions()[3];
  op.pairs = cos.dimensions()[1];
  op.interleaved = interleaved;
  forge::run_rotate_write(pool, op);
  return ffi::Error::Success();
}

ffi::Error embed(ffi::ThreadPool pool, ffi::AnyBuffer w, ffi::AnyBuffer scale, I32 tokens,
                 ffi::Result<BF16> out, int64_t format, int64_t columns, int64_t block,
                 int64_t group, int64_t minima) {
  forge::PackedEmbedding op;
  op.w = w.untyped_data();
  op.scale = static_cast<const float*>(scale.untyped_data());
  op.scale16 = static_cast<const uint16_t*>(scale.untyped_data());
  op.tokens = tokens.typed_data();
  op.out = bits(out);
  op.tokens_count = tokens.element_count();
  op.N = columns;
  op.K = out->dimensions()[1];
  op.panels = w.dimensions()[0];
  op.format = static_cast<forge::Format>(format);
  op.blocks = {block, group, minima != 0};
  constexpr long kTokens = 8;  // per item
  auto body = [&](long item) {
    long last = std::min(op.tokens_count, (item + 1) * kTokens);
    for (long t = item * kTokens; t < last; ++t) forge::embed_row(op, t);
  };
  long items = (op.tokens_count + kTokens - 1) / kTokens;
  forge::Team(pool, items).run(forge::phase(items, body));
  return ffi::Error::Success();
}

ffi::Error sample(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> logits,
                  ffi::Buffer<ffi::F32> temperature, I32 top_k, ffi::Buffer<ffi::F32> top_p,
                  ffi::Buffer<ffi::F32> min_p, ffi::Buffer<ffi::U32> key, I32 num_rows,
                  ffi::Result<I32> token) {
  forge::Sampling op;
  op.logits = logits.typed_data();
  op.temperature = temperature.typed_data();
  op.top_k = top_k.typed_data();
  op.top_p = top_p.typed_data();
  op.min_p = min_p.typed_data();
  op.key = key.typed_data();
  op.token = token->typed_data();
  op.rows = std::min<long>(num_rows.typed_data()[0], logits.dimensions()[0]);
  op.vocab = logits.dimensions()[1];
  std::fill(op.token, op.token + token->element_count(), 0);
  if (op.rows > 0) forge::run_sampling(pool, op);
  return ffi::Error::Success();
}

// Writes nothing, so that new memory gets its pages only when each is first used. These are huge pages
// where Linux has them, because attention reads small blocks anywhere in the cache.
ffi::Error untouched(ffi::Result<ffi::AnyBuffer> out) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = 4096;
  uintptr_t begin = reinterpret_cast<uintptr_t>(out->untyped_data());
  uintptr_t end = (begin + out->size_bytes()) / kPage * kPage;
  begin = (begin + kPage - 1) / kPage * kPage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
  return ffi::Error::Success();
}

}  // namespace

extern "C" {

const char* forge_isa() { return FORGE_ISA; }

// Returns 1 if this process may use AMX.
int forge_request_tiles() { return forge::request_tiles(); }

// Sets the numbers of rows from which AMX tiles are used; negative: never.
void forge_use_tiles(int64_t bf16_rows, int64_t int8_rows, int64_t group_rows) {
  int64_t from[] = {bf16_rows, int8_rows, group_rows};
  for (int i = 0; i < 3; ++i) forge::tiles_from[i] = from[i] < 0 ? forge::kNoTiles : from[i];
}

// Returns the seconds that one thread takes to multiply `rows` rows by a packed matrix. If the rows are
// rounded, the matrix has blocks of 32 values.
double forge_time_linear(const void* w, int64_t format, int64_t rows, int64_t outputs,
                         int64_t inputs, int64_t in_tiles) {
  std::vector<uint16_t> x(rows * inputs, 0x3f80);
  std::vector<float> y(rows * outputs), scale(outputs + forge::kPanel, 1.0f);
  forge::Linear op{};
  op.x = x.data();
  op.w = w;
  op.scale = scale.data();
  op.y32 = y.data();
  op.rows = rows;
  op.N = outputs;
  op.K = op.x_stride = inputs;
  op.in_tiles = in_tiles;
  op.blocks = {forge::kGroup, forge::kGroup, false};
  auto start = std::chrono::steady_clock::now();
  switch (static_cast<forge::Format>(format)) {
    case forge::Format::kBf16: forge::run_linear_alone<forge::Format::kBf16>(op); break;
    case forge::Format::kInt8: forge::run_linear_alone<forge::Format::kInt8>(op); break;
    case forge::Format::kRounded4: forge::run_linear_alone<forge::Format::kRounded4>(op); break;
    default: return 0.0;
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Packs bf16[N, K] into panels. `scale` is f32, f16 or unused, depending on the format; rows of int4
// scales are `scale_columns` apart. All memory is the caller's, who runs several threads.
void forge_pack(const uint16_t* w, int64_t rows, int64_t columns, int64_t paired, int64_t format,
                void* out, void* scale, int64_t scale_columns) {
  forge::Packing op;
  op.w = w;
  op.N = rows;
  op.K = columns;
  op.paired = paired;
  op.format = static_cast<forge::Format>(format);
  op.out = static_cast<uint8_t*>(out);
  op.scale = static_cast<float*>(scale);
  op.scale16 = static_cast<uint16_t*>(scale);
  op.scale_columns = scale_columns;
  long panels = paired ? (rows / 2 + 15) / 16 : (rows + forge::kPanel - 1) / forge::kPanel;
  for (long panel = 0; panel < panels; ++panel) forge::pack_panel(op, panel);
}

// Reads files into panels, or as plain bytes. Called by each of the threads that share the work.
void forge_read_files(const forge::MatrixInFiles* matrices, int64_t count,
                      const forge::Stretch* stretches, forge::Progress* progress) {
  forge::read_files(matrices, count, stretches, progress);
}

}  // extern "C"

XLA_FFI_DEFINE_HANDLER_SYMBOL(forge_embed, embed,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<I32>()
                                  .Ret<BF16>()
                                  .Attr<int64_t>("format")
                                  .Attr<int64_t>("columns")
                                  .Attr<int64_t>("block")
                                  .Attr<int64_t>("group")
                                  .Attr<int64_t>("minima"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(forge_linear, linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<BF16>()
                                  .Arg<BF16>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<BF16>()
                                  .Arg<I32>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("format")
                                  .Attr<int64_t>("epilogue")
                                  .Attr<int64_t>("columns")
                                  .Attr<float>("eps")
                                  .Attr<int64_t>("block")
                                  .Attr<int64_t>("group")
                                  .Attr<int64_t>("minima"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(forge_experts, experts,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<BF16>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<I32>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Ret<BF16>()
                                  .Attr<int64_t>("format")
                                  .Attr<int64_t>("block")
                                  .Attr<int64_t>("group")
                                  .Attr<int64_t>("minima")
                                  .Attr<int64_t>("down_format")
                                  .Attr<int64_t>("down_block")
                                  .Attr<int64_t>("down_group")
                                  .Attr<int64_t>("down_minima")
                                  .Attr<int64_t>("inner"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(forge_lora, lora,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<BF16>()
                                  .Arg<ffi::Buffer<ffi::U16>>()
                                  .Arg<ffi::Buffer<ffi::U16>>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Ret<BF16>()
                                  .Attr<int64_t>("layer")
                                  .Attr<int64_t>("rank"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(forge_attention, attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<BF16>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<BF16>()
                                  .Attr<float>("sm_scale")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("soft_cap"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(forge_rotate_write, rotate_write,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<BF16>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Arg<ffi::Buffer<ffi::U16>>()
                                  .Ret<BF16>()
                                  .Ret<ffi::Buffer<ffi::U16>>()
                                  .Attr<bool>("interleaved"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(forge_sample, sample,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<I32>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .Arg<I32>()
                                  .Ret<I32>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(forge_untouched, untouched,
                              ffi::Ffi::Bind().Ret<ffi::AnyBuffer>());
