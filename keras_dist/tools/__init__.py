"""Commands that no other part of the package imports.

- `bench_collectives`: measure allreduce: `keras-dist bench-collectives`
"""
