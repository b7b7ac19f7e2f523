#!/bin/bash
# A node with a GPU that is not healthy takes no job. In slurm.conf:
#   Prolog=/etc/slurm/check_gpus.sh
#   Epilog=/etc/slurm/check_gpus.sh
# Slurm drains the node if its prolog or epilog fails, and puts the job of a prolog back in the queue.
set -u
export PATH="${PATH:-/usr/local/bin:/usr/bin:/bin}" # Slurm sets none

said=$(timeout 60 rmetric telemetry --once 2>&1)
code=$?
case $code in
  0) exit 0 ;;
  1 | 3 | 124) ;; # no GPU can be read; one is not healthy; the driver hangs
  *)              # rmetric itself cannot run: no reason to drain every node of the cluster
    logger -t rmetric "the GPUs were not judged, exit code $code: $said"
    exit 0
    ;;
esac
why=$(printf '%s' "$said" | grep -v ': healthy' | tail -n 1)
scontrol update NodeName="${SLURMD_NODENAME:-$(hostname -s)}" State=DRAIN \
  Reason="rmetric ${SLURM_SCRIPT_CONTEXT:-}: exit code $code ${why:0:150}"
exit 1
