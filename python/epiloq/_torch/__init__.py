"""The torch layer under the operations: registration, the way around the dispatcher, threads, parameters, checks."""
