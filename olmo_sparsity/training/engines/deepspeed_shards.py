"""Find where DeepSpeed keeps the parts of a parameter: its fp32 copy and its moments.

DeepSpeed's optimizer does not see the parameters of a model. It concatenates them to flat tensors,
and divides these among processes. Two parameters, a of 6 numbers and b of 4, on two processes:

    stages 1 and 2    process 0    a0 a1 a2 a3 a4          cuts the whole, wherever that is
                      process 1    a5 b0 b1 b2 b3
    stage 3           process 0    a0 a1 a2 b0 b1          cuts each parameter
                      process 1    a3 a4 a5 b2 b3

With stage 1 the last number of a is on process 1, as `ShardPart(shard, offset=0, start=5,
length=1)`. Checkpoints are written and read by such parts (optimizer/moments.py), so that a run may
resume with another engine. deepspeed.py asks for each parameter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class ShardPart(NamedTuple):
    """The place of a part of a parameter in the flat shard of this process:

    parameter    0 … start … start + length … end
    shard             offset … offset + length
    """

    shard: Tensor
    offset: int
    """The first element of the part in the shard."""

    start: int
    """The first element of the part in the flat parameter."""

    length: int


def part_of_stages_1_and_2(zero_optimizer: Any, parameter: Any) -> ShardPart | None:
    """Return where this process holds a part of a parameter; None if it holds none. Other processes
    may hold others.

    Args:
        zero_optimizer: DeepSpeed's wrapper of the optimizer.
        parameter: A parameter of the model, of which DeepSpeed has noted where it is.
    """
    # DeepSpeed's words: lp is the parameter in low precision, hp its fp32 copy in the shard.
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    name = "single_partition_of_fp32_groups"
    if not hasattr(zero_optimizer, name):  # BF16_Optimizer
        name = "fp32_groups_flat_partition"
    shards_of_groups = getattr(zero_optimizer, name)
    in_parameter = mapping.lp_fragment_address
    return ShardPart(
        shard=shards_of_groups[mapping.param_group_index],
        offset=mapping.hp_fragment_address.start,
        start=in_parameter.start,
        length=in_parameter.numel,
    )


def part_of_stage_3(zero_optimizer: Any, parameter: Any, rank: int) -> ShardPart | None:
    """Return where this process holds its part of a parameter; None if it holds padding only. All
    parts are of one length, so that the last ones may be padded.

    Args:
        zero_optimizer: DeepSpeed's wrapper of the optimizer.
        parameter: A parameter of the model, which DeepSpeed has emptied.
        rank: The rank of this process.
    """
    # For 10 numbers on 4 processes padded_length is 3, and rank 3 holds the last number alone.
    parameter_id = zero_optimizer.get_param_id(parameter)
    group, offset, padded_length = zero_optimizer.grad_position[parameter_id]
    start = rank * padded_length
    length = min(padded_length, parameter.ds_numel - start)
    if length <= 0:  # only padding
        return None
    shard = zero_optimizer.fp32_partitioned_groups_flat[group]
    return ShardPart(shard, offset, start, length)
