#pragma once

#include <string>

#include "epiloq/online_quant_mm.h"

namespace epiloq {

// As `explain` and `explain_online_quant_mm`, with the cost model's terms of the chosen kernel and of the runner-up.
EPILOQ_API std::string explain_terms(OnlineQuantMm const& call);
EPILOQ_API std::string explain_online_quant_mm_terms(OnlineQuantProblem const& problem, Arch arch, int sm_count,
                                                     int memory_gb_s = 0);

}  // namespace epiloq
