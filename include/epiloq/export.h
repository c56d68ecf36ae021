#pragma once

// Symbols are hidden by default; only the public functions and the exception types carry this.
#define EPILOQ_API __attribute__((visibility("default")))
