"""Commands of `keras-dist`, which no other part of the package imports.

- `check/`: verify the installation on these machines: `keras-dist check`, `env`
- `scale/`: measure how a script scales with the number of ranks: `keras-dist scale`
- `migrate/`: rewrite scripts for `keras_dist`: `keras-dist migrate`
- `install/`: build Horovod for the installed TensorFlow: `keras-dist install-horovod`
- `bench`: measure allreduce: `keras-dist bench-collectives`
"""
