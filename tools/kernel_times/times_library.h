// What times_fit.py calls. Included last, after `numbers()` in the order of the header, `Candidate`, the list
// `candidates`, and of one of them `words_of` (as explain says it) and `microseconds_of`.

#include "epiloq/export.h"

extern "C" {

EPILOQ_API int numbers_read(double* values) {
  auto const all = numbers();
  for (std::size_t i = 0; values != nullptr && i < all.size(); ++i) values[i] = *all[i];
  return static_cast<int>(all.size());
}
EPILOQ_API void numbers_write(double const* values) {
  for (double* number : numbers()) *number = *values++;
}

// Adds what may serve a problem on a card of SM90; returns how many candidates there are by now.
EPILOQ_API int problem_add(int m, int n, int k, int bits, int memory_gb_s) {
  epiloq::Target const target{epiloq::Arch::kSm90, epiloq::kSmsOfClusters, 232448, true, memory_gb_s};
  add_candidates(m, n, k, bits, target);
  return static_cast<int>(candidates.size());
}
EPILOQ_API void candidate_name(int i, char* name, int bytes) {
  std::string const words = words_of(candidates[i]);
  name[words.copy(name, bytes - 1)] = '\0';
}
EPILOQ_API void times_of(double* microseconds) {
  for (Candidate const& c : candidates) *microseconds++ = microseconds_of(c);
}
}
