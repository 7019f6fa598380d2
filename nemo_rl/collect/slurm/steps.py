"""Components as steps of Slurm: the words of their `srun`."""

from collections.abc import Sequence

from nemo_rl.collect.slurm.submission import Submission
from nemo_rl.config.submit import SlurmComponentConfig


def step(
    submission: Submission,
    component: SlurmComponentConfig,
    *,
    job_nodes: int,
    num_nodes: int = 1,
    tasks_per_node: int = 1,
) -> tuple[str, ...]:
    """An `srun` that shares the job's resources with its other steps, and ends with the first task that fails.

    The nodes of a step are the first of the job's.
    """
    words = ["srun", "--overlap", "--overcommit", "--kill-on-bad-exit=1", f"--nodes={num_nodes}"]
    words += [f"--ntasks={num_nodes * tasks_per_node}", f"--ntasks-per-node={tasks_per_node}"]
    words += ["--relative=0"] if num_nodes < job_nodes else []
    words += ["--label"] if num_nodes * tasks_per_node > 1 else []
    words += _placement_options(submission, component)
    return (*words, *component.srun_args)


def _placement_options(submission: Submission, component: SlurmComponentConfig) -> Sequence[str]:
    """Where the step's processes are: the node's own file system, or a container's."""
    if component.container is None:
        return [f"--chdir={component.working_directory or submission.working_directory}"]
    words = [
        f"--container-image={component.container}",
        f"--container-mounts={','.join(_mounts(submission, component))}",
    ]
    if component.working_directory:
        words.append(f"--container-workdir={component.working_directory}")
    if component.environment:  # these win over the image's own
        words.append(f"--container-env={','.join(component.environment)}")
    return words


def _mounts(submission: Submission, component: SlurmComponentConfig) -> list[str]:
    """The component's own, and the directories of the collection, unless it mounts them itself."""
    mounts = list(component.mounts)
    targets = {mount.split(":")[1].rstrip("/") for mount in mounts}
    for path in (submission.output_dir, submission.directory):
        if not any(str(parent) in targets for parent in (path, *path.parents)):
            mounts.append(f"{path}:{path}")
            targets.add(str(path))
    return mounts
