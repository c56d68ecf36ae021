#pragma once

#include "dispatch/online_quant_mm/select.h"
#include "problems/online_quant_mm.h"

namespace epiloq::ops::online_quant_mm {

void launch(Choice const& choice, OnlineQuantProblem const& problem, Work const& work, int device, Stream stream);

}  // namespace epiloq::ops::online_quant_mm
