"""Step-time, memory and traffic benchmarks: zcompile beside the systems that it is measured by."""
