"""Build Horovod for the installed TensorFlow: `keras-dist install-horovod`.

- `facts`: what this environment has: TensorFlow, compilers, MPI, CUDA, NCCL
- `requirements`: what is missing for a build, in one message
- `flags`: flags and environment variables of the build
- `patch`: our one change to Horovod's source, and whether a library has it
- `build`: build the wheel, install it, and check that it can be imported
- `progress`: the line that shows how far the build is
- `failures`: the message about a step that failed, with a remedy if it is known
"""

from keras_dist.install.build import install_horovod
from keras_dist.install.failures import InstallError

__all__ = ["InstallError", "install_horovod"]
