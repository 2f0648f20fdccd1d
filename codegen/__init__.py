"""From a traced optimizer step to a kernel.

| module | what it does |
|---|---|
| trace | runs an optimizer's own step under a tracer |
| elementwise | its graph as a kernel, and as numbers that are computed outside of one |
| kernel | what a kernel is, before it is source of any language |
| cpp, triton | its source |
| build | something to call |
"""
