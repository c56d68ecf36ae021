#include "ops/scaled_mm/launch.h"

#include <utility>

#include "epiloq/error.h"

#if EPILOQ_HAS_CUDA
#include "core/cuda_check.h"
#include "ops/scaled_mm/configs.h"
#include "ops/scaled_mm/kernels.h"
#endif

namespace epiloq::ops::scaled_mm {

#if EPILOQ_HAS_CUDA
namespace {

// A row of each table: one tile's kernels, by output type and epilogue.
struct Variants {
  gemm::Launch by_out_and_zero_point[2][2];
};

#define EPILOQ_VARIANTS(LAUNCH, ROW)                                                                           \
  Variants {                                                                                                   \
    {{&LAUNCH<ROW, DType::kFloat16, epilogue::Scaled>, &LAUNCH<ROW, DType::kFloat16, epilogue::ScaledAzp>},    \
     {&LAUNCH<ROW, DType::kBFloat16, epilogue::Scaled>, &LAUNCH<ROW, DType::kBFloat16, epilogue::ScaledAzp>}}, \
  }

#define EPILOQ_TABLE(NAME, LAUNCH)                                            \
  template <std::size_t... kRows>                                             \
  Variants const* NAME(std::index_sequence<kRows...>) {                       \
    static constexpr Variants kTable[] = {EPILOQ_VARIANTS(LAUNCH, kRows)...}; \
    return kTable;                                                            \
  }
EPILOQ_TABLE(generic_table, launch_generic)
#if EPILOQ_HAS_SM75
EPILOQ_TABLE(sm75_table, launch_sm75)
#endif
#if EPILOQ_HAS_SM80
EPILOQ_TABLE(sm80_table, launch_sm80)
EPILOQ_TABLE(skinny_table, launch_skinny)
#endif
#if EPILOQ_HAS_SM90
EPILOQ_TABLE(sm90_table, launch_sm90)
#endif
#undef EPILOQ_TABLE
#undef EPILOQ_VARIANTS

template <auto const& kTiles>
using Rows = std::make_index_sequence<kTiles.size()>;

Variants const* table_of(Family family) {
  switch (family) {
    case Family::kGeneric:
      return generic_table(std::make_index_sequence<1>{});
#if EPILOQ_HAS_SM75
    case Family::kSm75:
      return sm75_table(Rows<kSm75Tiles>{});
#endif
#if EPILOQ_HAS_SM80
    case Family::kSm80:
      return sm80_table(Rows<kSm80Tiles>{});
    case Family::kSkinny:
      return skinny_table(Rows<kSkinnyTiles>{});
#endif
#if EPILOQ_HAS_SM90
    case Family::kSm90:
      return sm90_table(Rows<kSm90Tiles>{});
#endif
    default:
      throw Unsupported("epiloq.scaled_mm: this build lacks the kernels asked for; see EPILOQ_ARCHS");
  }
}

// SM90 kernels use instructions of compute capability 9.0 alone; the others run on anything that is newer.
bool runs_on(Arch arch, int compute_capability) {
  if (arch == Arch::kSm90) return compute_capability == 90;
  return compute_capability >= static_cast<int>(arch);
}

}  // namespace

Target target_of_device(int device) {
  DeviceProperties const& properties = device_properties(device);
  Arch const forced = forced_arch();
  for (Arch arch : {Arch::kSm90, Arch::kSm80, Arch::kSm75}) {
    if (forced != Arch::kAuto && forced != arch) continue;
    if (is_built(arch) && runs_on(arch, properties.compute_capability)) {
      return {arch, properties.sm_count, properties.shared_memory_per_block};
    }
  }
  std::string built_names;
  for (Arch arch : built_archs()) built_names += " " + name(arch);
  throw Unsupported("epiloq.scaled_mm: no kernel for cuda:" + std::to_string(device) + " (compute capability " +
                    std::to_string(properties.compute_capability) + ", arch " + name(forced) + "); this build has" +
                    built_names);
}

void launch(Choice const& choice, DType out, bool has_zero_point, gemm::Problem const& problem, int device,
            Stream stream) {
  DeviceGuard const guard(device);
  Variants const& variants = table_of(choice.family)[choice.row];
  variants.by_out_and_zero_point[out == DType::kBFloat16][has_zero_point](problem, device, stream);
}
#else
Target target_of_device(int device) {
  device_properties(device);
  return {};
}

void launch(Choice const&, DType, bool, gemm::Problem const&, int device, Stream) { device_properties(device); }
#endif

}  // namespace epiloq::ops::scaled_mm
