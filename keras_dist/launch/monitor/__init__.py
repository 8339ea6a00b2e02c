"""Detect ranks that wait forever, and record where each rank is. Needs no TensorFlow.

- `record`: where this rank is (epoch, step, collective), readable by other processes
- `end_note`: why this rank has ended, for those that wait for it
- `watchdog`: a thread that ends the job if no rank makes progress, by the heartbeats
- `rank_process`: the process of a rank under `keras-dist run`, which runs the user's
  script; the report that it writes for the launcher if it fails; the seed of all ranks
"""
