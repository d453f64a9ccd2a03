"""What tests ask of a pipeline that users cannot: the only place where they look into one."""

import os
import signal

from pipedream_rt import WorkerLost


def cluster(pipe):
    """Where its stages run."""
    return pipe._group.cluster


def recovery(pipe):
    return pipe._group.recovery


def feed_log(pipe):
    """What was fed since the last checkpoint."""
    return pipe._group.feed.log


def script_loss(pipe):
    """What gives the stages the gradients of the script."""
    return pipe._run.script_loss


def finish_checkpoint(pipe):
    """Wait until the checkpoint that was due is whole: on a busy machine it may not be yet."""
    pipe.flush()
    pipe._run.run_state.finish_checkpoint()


def members(pipe):
    """What stands for its workers, by rank."""
    return cluster(pipe)._members


def local_workers(pipe):
    """Its worker processes on this machine, and who forks them."""
    return cluster(pipe)._local


def pids(pipe):
    """The ids of its worker processes, by name."""
    return {name: each.pid for name, each in local_workers(pipe).processes.items()}


def kill(pipe, worker, how=signal.SIGKILL):
    """Send a signal to a worker process, by its name."""
    os.kill(pids(pipe)[worker], how)


def lose(pipe, stage=1):
    """Let a worker that is a thread be gone."""
    found, name = recovery(pipe), f"stage-{stage}"
    gone = WorkerLost(f"worker {name!r} is gone", worker=name, stage=stage)
    found._receiver.fail_of(found.generation)(gone)


def hosts(pipe):
    """The hosts of its stages, if they are in this thread."""
    return cluster(pipe)._hosts


def stages(pipe):
    """Its stages, if they are in this thread."""
    return [stage for host in hosts(pipe) for stage in host._stages.values()]
