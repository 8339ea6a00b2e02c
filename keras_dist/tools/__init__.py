"""Commands of `keras-dist`, which no other part of the package imports.

- `check/`: verify the installation on these machines: `keras-dist check`, `env`
- `install/`: build Horovod for the installed TensorFlow: `keras-dist install-horovod`
"""
