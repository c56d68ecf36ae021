"""The torch layer under the operations: registration, direct calls, threads, parameters, checks."""
