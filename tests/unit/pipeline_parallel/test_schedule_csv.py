"""Programs as PyTorch's CSV, in both directions: PyTorch's own parser reads ours, and its own
schedules verify and simulate."""

import csv
import io

import pytest
from torch.distributed.pipelining import schedules as torchs

from megatron5d.pipeline_parallel.costs import Costs
from megatron5d.pipeline_parallel.program import Action, placement_name
from megatron5d.pipeline_parallel.registry import build_program, schedule_names
from megatron5d.pipeline_parallel.schedule_csv import (
    read_file,
    read_program,
    slot_text,
    write_program,
)
from megatron5d.pipeline_parallel.simulate import simulate
from megatron5d.pipeline_parallel.verify import verify


@pytest.mark.parametrize("name", schedule_names())
@pytest.mark.parametrize("p, m", [(2, 4), (4, 8), (4, 12)])
def test_round_trip(name, p, m):
    program = build_program(name, p, m)
    assert read_program(write_program(program), name) == program  # placement, directions inferred
    assert read_program(write_program(program), name, p, m) == program


@pytest.mark.parametrize("name", schedule_names())
def test_torch_reads_what_we_write(name):
    program = build_program(name, 4, 8)
    rows = csv.reader(io.StringIO(write_program(program)))
    lines = [[torchs._Action.from_str(cell) for cell in row] for row in rows]
    assert [
        [
            tuple(
                (a.computation_type.value, a.stage_index, a.microbatch_index)
                for a in cell.sub_actions or (cell,)
            )
            for cell in line
        ]
        for line in lines
    ] == [[tuple(map(tuple, slot)) for slot in line] for line in program.ranks]
    if program.copies == 1:
        actions = dict(enumerate(lines))
        mapping = torchs._validate_schedule(actions, 4, program.num_stages, 8)
        assert mapping == dict(enumerate(program.placement.route[0]))
        # raises where it would hang
        torchs._add_send_recv(actions, lambda stage: mapping[stage], program.num_stages)


def torch_csv(schedule, p, m, chunks):
    """The order of one of torch's generators as CSV, without process groups or modules."""
    generator = schedule.__new__(schedule)
    generator.pp_group_size, generator._n_microbatches, generator.n_local_stages = p, m, chunks
    generator._num_stages = generator.num_stages = p * chunks
    generator._stages = [None] * chunks
    generator.number_of_rounds = max(1, m // p)
    generator.microbatches_per_round = m // generator.number_of_rounds
    if chunks == 1:
        order = generator._get_pipeline_order()
    else:
        order = {rank: generator._calculate_single_rank_operations(rank) for rank in range(p)}
    out = io.StringIO()
    csv.writer(out).writerows(["" if a is None else a for a in order[rank]] for rank in range(p))
    return out.getvalue()


TORCHS = {
    "gpipe": (torchs.ScheduleGPipe, 1),
    "bfs": (torchs.ScheduleLoopedBFS, 2),
    "interleaved": (torchs.ScheduleInterleaved1F1B, 2),
    "interleaved_zb": (torchs.ScheduleInterleavedZeroBubble, 2),
    "zb_v": (torchs.ScheduleZBVZeroBubble, 2),
    "dualpipe_v": (torchs.ScheduleDualPipeV, 2),
}


@pytest.mark.parametrize("name", TORCHS)
@pytest.mark.parametrize("p, m", [(2, 4), (4, 8), (4, 16), (8, 24)])
def test_torchs_own_schedules_verify_and_cost_what_ours_do(name, p, m):
    schedule, chunks = TORCHS[name]
    program = read_program(torch_csv(schedule, p, m, chunks), f"torch {name}", p, m)
    ours = build_program(name, p, m)
    assert program.placement == ours.placement
    peaks = verify(program).peak_activations
    costs = Costs(F=1.0, I=1.25, W=0.75, comm=0.125, a2aF=0.5, a2aB=0.25)
    assert simulate(program, costs).makespan == pytest.approx(simulate(ours, costs).makespan)
    assert peaks.tolist() == verify(ours).peak_activations.tolist()
    if name in ("interleaved_zb", "zb_v", "dualpipe_v"):
        assert program.ranks == ours.ranks


def test_torchs_picture_of_1f1b_is_rejected():
    """Its `_get_pipeline_order` leaves out F0 on the last rank and has one micro-batch too many
    there."""
    text = torch_csv(torchs.Schedule1F1B, 4, 8, 1)
    with pytest.raises(ValueError, match="rank 3: 3F8 is beyond num_microbatches=8"):
        read_program(text, "torch 1f1b", 4, 8)
    with pytest.raises(ValueError, match="is missing"):
        verify(read_program(text, "torch 1f1b", 4))


def test_communication_and_empty_cells_are_skipped():
    text = "0UNSHARD,0F0,0SEND_F0,,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD\n1RECV_F0,1F0,1B0,1SEND_B0\n"
    program = read_program(text, "torch", 2, 1)
    assert write_program(program) == "0F0,0B0\n1F0,1B0\n"
    verify(program)


@pytest.mark.parametrize(
    "pair", ["(0F1;0I0)OVERLAP_F_B", "(0F1;0I0)OVERLAP_F_I", "(0F1 ; 0I0 )OVERLAP"]
)
def test_every_pair_is_written_under_torchs_one_name(pair):
    program = read_program(f"0F0, {pair}", "pair")
    assert program.ranks[0][1] == (Action("F", 0, 1), Action("I", 0, 0))
    assert write_program(program) == "0F0,(0F1;0I0)OVERLAP_F_B\n"
    assert slot_text(program.ranks[0][1]) == "(0F1;0I0)OVERLAP_F_B"


@pytest.mark.parametrize(
    "text, error",
    [
        ("0F0,hello\n", "rank 0, column 1: 'hello' is not an action"),
        ("0F0\n1F0,1G0\n", "rank 1, column 1: '1G0'"),
        ("(0F0;0F1;0F2)OVERLAP_F_B\n", "is not an action"),
        ("", "no action"),
        ("0F0,2F0\n1F0\n", "3 stages on 2 ranks.*such as 4"),
        ("99999999999F0,0B0\n", "bad.csv has stage 99999999999, but only 2 actions"),
        (f'"{"0F0," * 50_000}"', "bad.csv is not a CSV file: field larger than"),
    ],
)
def test_bad_text_is_rejected_with_its_cell(text, error):
    with pytest.raises(ValueError, match=error):
        read_program(text, "bad.csv")


def test_a_program_is_named_after_its_file(tmp_path):
    path = tmp_path / "of_excel.csv"
    path.write_bytes(b"\xef\xbb\xbf0F0,0B0\r\n")
    assert write_program(read_file(path, 1, 1)) == "0F0,0B0\n"
    path.write_bytes(b"0F0,\xd0")
    with pytest.raises(ValueError, match="of_excel.csv, rank 0, column 1: .* is not an action"):
        read_file(path, 1, 1)


def test_sizes_are_checked_against_the_file():
    text = write_program(build_program("1f1b", 2, 4))
    with pytest.raises(ValueError, match="2 rows, one per rank, but pp=4"):
        read_program(text, "f", 4)
    with pytest.raises(ValueError, match="rank 0: 0F3 is beyond num_microbatches=3"):
        read_program(text, "f", 2, 3)
    with pytest.raises(ValueError, match="0F4 is missing"):
        verify(read_program(text, "f", 2, 5))


@pytest.mark.parametrize("name, action", [("dualpipe", "3F4"), ("zb_v", "0F0"), ("1f1b", "2F3")])
def test_a_misplaced_action_does_not_mislead_the_inference(name, action):
    """The placement follows the majority, so that verify points at the one wrong cell."""
    program = build_program(name, 4, 8)
    rows = [row.split(",") for row in write_program(program).splitlines()]
    rank = next(rank for rank, row in enumerate(rows) if action in row)
    rows[rank].remove(action)
    rows[(rank + 1) % 4].insert(0, action)
    misplaced = read_program("\n".join(map(",".join, rows)), name, 4, 8)
    assert misplaced.placement == program.placement and misplaced.direction == program.direction
    error = f"rank {(rank + 1) % 4}, position 0: {action} is on rank"
    with pytest.raises(ValueError, match=error):
        verify(misplaced)


def test_a_typo_in_a_stage_is_reported_at_its_place():
    text = write_program(build_program("1f1b", 4, 8)).replace("2F3,", "7F3,")
    with pytest.raises(ValueError, match="rank 2, position 5: 7F3: the stages are 0 to 3"):
        verify(read_program(text, "typo", 4, 8))


def test_rows_in_another_order_are_another_placement():
    rows = write_program(build_program("1f1b", 3, 4)).splitlines()
    program = read_program("\n".join(rows[::-1]), "reversed", 3, 4)
    verify(program)
    assert program.placement.route == ((2, 1, 0),)
    assert placement_name(program.placement) == "custom (2 1 0)"


@pytest.mark.parametrize(
    "name, kind", [("1f1b", "loop"), ("bfs", "loop"), ("zb_v", "zigzag"), ("dualpipe", "mirrored")]
)
def test_placements_have_names(name, kind):
    assert placement_name(build_program(name, 4, 8).placement) == kind
