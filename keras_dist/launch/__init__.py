"""Start the ranks of a job, end all that they have started, and show the first failure.

- `function`: `keras_dist.run`, which calls a function on many ranks
- `command`: the command `keras-dist run`
- `options`: its options
- `assignment`: which ranks a host runs, where the store is, who watches: all that a way
  to start a job has to find out
- `jobs`: one job: on this host or on several, with restarts
- `ranks`: the ranks of one host: start them, watch them, end them
- `spares`: processes that wait for the next start of the ranks
- `processes`: find and end all processes of a job, even if the launcher is killed
- `output`: what the ranks print, passed on to the terminal or to files
- `reports`: run a host's ranks to their end, and report how it came
- `failures`: which rank failed first, and the message for the user
- `hosts`: which rank runs on which host, and addresses of this host
- `rendezvous`: the key-value store in which the ranks find each other
- `guarded`: the requests that the store answers
- `tls`, `relays`: connections from other hosts to the store that are encrypted
- `reach`: how other hosts are reached by ssh
- `remote_hosts`: start an agent on each host by ssh
- `remote_start`: such agents from a start of all ranks to its end
- `agent`: starts the ranks of its host, and reports their failures
- `calls`: ranks that an actor of Ray or a task of Spark starts: the driver's side
- `call_store`: the store of such a job, and what the agents need of it
- `call_agent`: the side of the actor or task
- `call_errors`: what the caller gets if one of them has failed
- `heartbeat`: heartbeats of the agents, by which a lost host is noticed
- `own_name`: check a host's own name where Horovod has not our patch
- `signals`: signals that stop a job
- `restarts`: how a start has ended; how often a job is started again, and when
- `elastic`: jobs whose hosts come and go: who is left out, what has changed at a start
- `elastic_jobs`: such a job with ssh
- `discovery`: with ssh, which hosts there are now: by a list, or by a script

Hosts that meet, without ssh:

- `meeting`: where, and who this host is, as the user or SLURM has said; what the first
  host was asked for
- `rdzv`: take part in such a job
- `first_host`: whether this host is the first one, which has the store
- `gathering`, `coordinator`: in the process of the first host: who has come, and the
  start, watch and restart of all ranks
- `follower`: on each host: do what the first one orders
- `orders`: what it orders, and whether it is still there
- `members`: numbers of the hosts that have come, and the slots of their ranks
- `host_store`: signed values that these hosts write for each other
- `gpus`: how many ranks a host starts by default
- `slurm`: the variables of SLURM
- `slurm_step`: what a step of SLURM knows of all this
- `slurm_task`: how tasks of SLURM meet that are ranks themselves
- `munge`: pass the secret of a job to other tasks of this user

Beside these: `horovod_library` (which of our changes the installed Horovod has) and
`monitor/` (where each rank is, and whether the job still makes progress).
"""

from keras_dist.launch.function import run

__all__ = ["run"]
