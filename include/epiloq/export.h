#pragma once

// Everything is hidden unless it says otherwise; only the public functions and the exception types carry this.
#define EPILOQ_API __attribute__((visibility("default")))
