"""Grammar of all instructions that are modelled, a row for each legal form.

A row has an opcode and, after two spaces, its operands. They read as the PTX ISA's own lines do:

    [.ftz]      may be there; [.ca|cg] one of these may
    .(lo|hi)    one of these
    .<rnd>      one of SETS["rnd"]
    *           at the beginning of a row: modifiers may stand in any order, but types and state spaces keep
                the row's among themselves. In rows without it all modifiers have the row's order.

    d           a result: a register, or _             d[|p]   one result or two, d|p two
    r           a register
    p           a result that is a predicate, or _     pred    a predicate, perhaps inverted, or a literal
    a           a value: a register, a literal, a special register, a variable's address
    b32         a value; if a register, one of this width  policy  a register of 64 bits
    imm         a literal; 4|8 one of these            [a]     an address; [a, {}] a place in a tensor
    {d} {a}     a vector, or one register              {d}4    of four
    {s}         registers and literals alone           {r}     a vector of registers
    a/[a]       either
    x?          may be left out
    x@bool      is there if the modifier of SETS["bool"] is; x@hint? may be there then
    {d}@vec     as many as the number in that modifier, one without it; {d}@x*2 twice as many

A row that ends in `! why` is known and refused. Nothing else is accepted. Rows are parsed when the first
instruction of their name is met (syntax.py).
"""

from __future__ import annotations

import re
from functools import lru_cache

from ptxsim.isa import syntax

_USES = ("fill", "use", "lastuse", "discard")
SETS = {
    # types
    "int": "u16 u32 u64 s16 s32 s64",
    "wide": "u32 u64 s32 s64",
    "word": "b16 b32 b64",
    "scalar": "b16 b32 b64 u16 u32 u64 s16 s32 s64 f32 f64",
    "half": "f16 f16x2 bf16 bf16x2",
    "cint": "u8 u16 u32 u64 s8 s16 s32 s64",
    "small": "e4m3x2 e5m2x2 e3m2x2 e2m3x2 e2m1x2",
    "cell": "b8 b16 b32 b64 b128 u8 u16 u32 u64 s8 s16 s32 s64 f32 f64",
    "stored": "b32 b64 u32 u64 s32 s64 f32 f64",
    "truth": "u32 s32 u16 s16 f32 f16 bf16",
    # rounding, comparison
    "rnd": "rn rz rm rp",
    "integral": "rni rzi rmi rpi",
    "property": "finite infinite number notanumber subnormal normal",
    "equal": "eq ne",
    "signed": "eq ne lt le gt ge",
    "unsigned": "eq ne lt le gt ge lo ls hi hs",
    "float": "eq ne lt le gt ge equ neu ltu leu gtu geu num nan",
    "bool": "and or xor",
    "pick": "f4e b4e rc8 ecl ecr rc16",
    # memory
    "space": "global shared shared::cta shared::cluster local const param param::entry",
    "updated": "global shared shared::cta shared::cluster",
    "ss": "shared shared::cta",
    "sss": "shared shared::cta shared::cluster",
    "scope": "cta cluster gpu sys",
    "near": "cta cluster",
    "sem": "relaxed acquire release acq_rel",
    "L1": "L1::evict_normal L1::evict_unchanged L1::evict_first L1::evict_last L1::no_allocate",
    "L2": "L2::evict_normal L2::evict_first L2::evict_last",
    "ahead": "L2::64B L2::128B L2::256B",
    "hint": "L2::cache_hint",
    "evict": "L2::evict_last L2::evict_normal L2::evict_first L2::evict_unchanged",
    "other": "L2::evict_first L2::evict_unchanged",
    "reduced": "add min max inc dec and or xor",
    "vec": "v2 v4 v8",
    "pair": "v2 v4",
    # matrices, tensors
    "x": "x1 x2 x4",
    "x12": "x1 x2",
    "n32": "x1 x2 x4 x8 x16 x32",
    "n64": "x1 x2 x4 x8 x16 x32 x64",
    "n128": "x1 x2 x4 x8 x16 x32 x64 x128",
    "spread": "b4x16_p64 b6x16_p32",
    "dim": "1d 2d 3d 4d 5d",
    "multicast": "multicast::cluster",
    "cg": "cta_group::1 cta_group::2",
    "a": " ".join(f"collector::a::{use}" for use in _USES),
    "b": " ".join(
        f"collector::b{i}::{use}" for i in range(4) for use in ("fill", "use", "lastuse", "discard")
    ),
    "k8": " ".join(f"m64n{n}k8" for n in range(8, 257, 8)),
    "k16": " ".join(f"m64n{n}k16" for n in range(8, 257, 8)),
    "k32": " ".join(f"m64n{n}k32" for n in range(8, 257, 8)),
}

ROWS = {
    "integers": """
*add.<int>  d, a, a
*add.(u16x2|s16x2)  d, a, a
*sub.<int>  d, a, a
*(add|sub).sat.s32  d, a, a
*(add|sub).cc.<wide>  d, a, a
*(addc|subc)[.cc].<wide>  d, a, a
*mul.(lo|hi).<int>  d, a, a
*mul.wide.(u16|u32|s16|s32)  d, a, a
*mad.(lo|hi).<int>  d, a, a, a
*mad.wide.(u16|u32|s16|s32)  d, a, a, a
*mad.hi.sat.s32  d, a, a, a
mad.(lo|hi).cc.<wide>  d, a, a, a
*madc.(lo|hi)[.cc].<wide>  d, a, a, a
*mul24.(lo|hi).(u32|s32)  d, a, a
*mad24.(lo|hi).(u32|s32)  d, a, a, a
*mad24.hi.sat.s32  d, a, a, a
*sad.<int>  d, a, a, a
*(div|rem).<int>  d, a, a
*(abs|neg).(s16|s32|s64)  d, a
*(min|max).<int>  d, a, a
*(min|max).(u16x2|s16x2)  d, a, a
*(min|max).relu.(s32|s16x2)  d, a, a
dp4a.(u32|s32).(u32|s32)  d, a, a, a
*dp2a.(lo|hi).(u32|s32).(u32|s32)  d, a, a, a
""",
    "bits": """
*(and|or|xor).<word>  d, a, a
*(and|or|xor).pred  p, pred, pred
*not.<word>  d, a
*not.pred  p, pred
*cnot.<word>  d, a
*lop3.b32  d, a, a, a, imm
*lop3.(and|or).b32  d|p, a, a, a, imm, pred
*shl.<word>  d, a, a
*shr.(b16|b32|b64|u16|u32|u64|s16|s32|s64)  d, a, a
*shf.(l|r).(clamp|wrap).b32  d, a, a, a
*prmt.b32[.<pick>]  d, a, a, a
*(popc|clz|brev).(b32|b64)  d, a
*bfind[.shiftamt].<wide>  d, a
*fns.b32  d, a, a, a
*bfe.<wide>  d, a, a, a
*bfi.(b32|b64)  d, a, a, a, a
*bmsk.(clamp|wrap).b32  d, a, a
*szext.(clamp|wrap).(u32|s32)  d, a, a
""",
    "floating point": """
*(add|sub)[.<rnd>][.ftz][.sat].f32  d, a, a
*(add|sub)[.<rnd>][.sat].f32.(f16|bf16)  d, a, a
*mul[.<rnd>][.ftz][.sat].f32  d, a, a
*(add|sub|mul)[.<rnd>][.ftz].f32x2  d, a, a
*(add|sub|mul)[.<rnd>].f64  d, a, a
*(add|sub|mul)[.rn][.ftz][.sat].(f16|f16x2)  d, a, a
*(add|sub|mul)[.rn].(bf16|bf16x2)  d, a, a
*(fma|mad).<rnd>[.ftz][.sat].f32  d, a, a, a
*(fma|mad).<rnd>[.ftz].f32x2  d, a, a, a
*(fma|mad).<rnd>.f64  d, a, a, a
*fma.<rnd>[.sat].f32.(f16|bf16)  d, a, a, a
*fma.rn[.ftz][.sat].(f16|f16x2)  d, a, a, a
*fma.rn[.ftz].relu.(f16|f16x2)  d, a, a, a
*fma.rn[.relu].(bf16|bf16x2)  d, a, a, a
*div.<rnd>[.ftz].f32  d, a, a
*div.<rnd>.f64  d, a, a
*div.(approx|full)[.ftz].f32  d, a, a
*(rcp|sqrt).<rnd>[.ftz].f32  d, a
*(rcp|sqrt).<rnd>.f64  d, a
*(rcp|sqrt).approx[.ftz].f32  d, a
*rcp.approx.ftz.f64  d, a
*(ex2|lg2|sin|cos|rsqrt).approx[.ftz].f32  d, a
*rsqrt.approx[.ftz].f64  d, a
*ex2.approx.(f16|f16x2)  d, a
*ex2.approx.ftz.(bf16|bf16x2)  d, a
*tanh.approx.(f32|f16|f16x2|bf16|bf16x2)  d, a
*(abs|neg)[.ftz].(f32|f16|f16x2)  d, a
*(abs|neg).(f64|bf16|bf16x2)  d, a
*copysign.(f32|f64)  d, a, a
*testp.<property>.(f32|f64)  p, a
*(min|max)[.ftz][.NaN].f32  d, a, a, a?
*(min|max)[.ftz][.NaN].abs.f32  d, a, a, a
*(min|max)[.ftz][.NaN].xorsign.abs.f32  d, a, a
*(min|max).f64  d, a, a
*(min|max)[.ftz][.NaN][.xorsign.abs].(f16|f16x2)  d, a, a
*(min|max)[.NaN][.xorsign.abs].(bf16|bf16x2)  d, a, a
""",
    "comparison": """
*setp.<equal>[.<bool>].<word>  p[|q], a, a, pred@bool
*setp.<unsigned>[.<bool>].(u16|u32|u64)  p[|q], a, a, pred@bool
*setp.<signed>[.<bool>].(s16|s32|s64)  p[|q], a, a, pred@bool
*setp.<float>[.<bool>][.ftz].f32  p[|q], a, a, pred@bool
*setp.<float>[.<bool>].f64  p[|q], a, a, pred@bool
*setp.<float>[.<bool>][.ftz].f16  p, a, a, pred@bool
*setp.<float>[.<bool>].bf16  p, a, a, pred@bool
*setp.<float>[.<bool>][.ftz].f16x2  p|q, a, a, pred@bool
*setp.<float>[.<bool>].bf16x2  p|q, a, a, pred@bool
*set.<equal>[.<bool>].<truth>.<word>  d, a, a, pred@bool
*set.<unsigned>[.<bool>].<truth>.(u16|u32|u64)  d, a, a, pred@bool
*set.<signed>[.<bool>].<truth>.(s16|s32|s64)  d, a, a, pred@bool
*set.<float>[.<bool>][.ftz].<truth>.(f32|f16)  d, a, a, pred@bool
*set.<float>[.<bool>].<truth>.(f64|bf16)  d, a, a, pred@bool
*set.<float>[.<bool>][.ftz].(f16x2|u32|s32).f16x2  d, a, a, pred@bool
*set.<float>[.<bool>].(bf16x2|u32|s32).bf16x2  d, a, a, pred@bool
*selp.<scalar>  d, a, a, pred
*slct.<scalar>.s32  d, a, a, a
*slct[.ftz].<scalar>.f32  d, a, a, a
""",
    "moves": """
mov.<scalar>  d, a
mov.b128  d, a
mov.pred  p, pred
mov.b16  {d}2, a
mov.b16  r, {a}2
mov.(b32|b64|b128)  {d}2/{d}4, a
mov.(b32|b64)  r, {a}2/{a}4
mov.b128  d, {a}2/{a}4
*cvta[.to].<space>.u64  d, a
isspacep.(global|local|shared|shared::cta|shared::cluster)  p, a
mapa.shared::cluster.(u32|u64)  d, a, a
mapa.u64  d, a, a
getctarank.shared::cluster.(u32|u64)  d, a
getctarank.u64  d, a
call[.uni]  {a}1, a, {a}2
""",
    "conversions": """
*cvt[.sat].<cint>.<cint>  d, a
*cvt.<integral>[.ftz][.sat].<cint>.f32  d, a
*cvt.<integral>[.sat].<cint>.(f16|bf16|f64)  d, a
*cvt.<rnd>[.ftz][.sat].f32.<cint>  d, a
*cvt.<rnd>[.sat].(f16|bf16|f64).<cint>  d, a
*cvt[.<integral>][.ftz][.sat].f32.f32  d, a
*cvt[.<integral>][.sat].f16.f16  d, a
*cvt[.<integral>][.sat].f64.f64  d, a
*cvt.<integral>.bf16.bf16  d, a
*cvt.<rnd>[.ftz][.sat].f16.f32  d, a
*cvt.<rnd>[.ftz].bf16.f32  d, a
*cvt.(rn|rz)[.relu][.satfinite].(f16|bf16|tf32).f32  d, a
*cvt.rna[.satfinite].tf32.f32  d, a
*cvt.<rnd>[.sat].f16.(f64|bf16)  d, a
*cvt.<rnd>.bf16.(f64|f16)  d, a
*cvt.<rnd>[.ftz][.sat].f32.f64  d, a
*cvt[.ftz][.sat].f32.f16  d, a
*cvt[.<rnd>][.ftz][.sat].f32.bf16  d, a
*cvt[.ftz][.sat].f64.f32  d, a
*cvt[.sat].f64.f16  d, a
*cvt[.<rnd>][.sat].f64.bf16  d, a
*cvt.(rn|rz)[.relu][.satfinite].(f16x2|bf16x2).f32  d, a, a
*cvt.rn.satfinite[.relu].<small>.f32  d, a, a
*cvt.rn.satfinite[.relu].<small>.(f16x2|bf16x2)  d, a
*cvt.rn[.relu].f16x2.<small>  d, a
*cvt.rn[.relu][.satfinite].bf16x2.<small>  d, a
*cvt.(rz|rp)[.satfinite].ue8m0x2.f32  d, a, a
*cvt.(rz|rp)[.satfinite].ue8m0x2.bf16x2  d, a
*cvt.rn.bf16x2.ue8m0x2  d, a
*cvt.rn.satfinite[.relu].s2f6x2.f32  d, a, a
*cvt.rn.satfinite[.relu].s2f6x2.bf16x2  d, a
*cvt.rn[.satfinite][.relu].bf16x2.s2f6x2  d, a
*cvt.rn[.satfinite][.relu].scaled::n2::ue8m0.bf16x2.s2f6x2  d, a, a
cvt.rs[.relu][.satfinite].bf16x2.f32  d, a, a, a
cvt.pack.sat.(u16|s16).s32  d, a, a
cvt.pack.sat.(u2|s2|u4|s4|u8|s8).s32.b32  d, a, a, a
""",
    "memory": """
*(ld|ldu)[.weak|volatile][.<space>][.ca|cg|cs|lu|cv][.nc][.unified][.<L1>][.<L2>][.<hint>][.<ahead>]
    [.<vec>].<cell>  {d}@vec, [a], policy@hint?
*ld[.mmio].(relaxed|acquire)[.<scope>][.<space>][.<L1>][.<L2>][.<hint>][.<ahead>]
    [.<vec>].<cell>  {d}@vec, [a], policy@hint?
*st[.weak|volatile][.<space>][.wb|cg|cs|wt][.<L1>][.<L2>][.<hint>][.<vec>].<cell>  [a], {a}@vec, policy@hint?
*st[.mmio].(relaxed|release)[.<scope>][.<space>][.<L1>][.<L2>][.<hint>]
    [.<vec>].<cell>  [a], {a}@vec, policy@hint?
*prefetch[.global|local|const|param].(L1|L2)  [a]
*prefetch.global.<evict>  [a]
*prefetch[.const|param].tensormap  [a]
prefetchu.L1  [a]
*applypriority[.global].L2::evict_normal  [a], 128
*discard[.global].L2  [a], 128
createpolicy.fractional.<evict>[.<other>].b64  d, a?
createpolicy.range[.global].<evict>[.<other>].b64  d, [a], a, a
createpolicy.cvt.L2.b64  d, a
""",
    "atomics": """
*atom[.<sem>][.<scope>][.<updated>].add[.<hint>].(u32|s32|u64|s64|f32|f64)  {d}1, [a], {a}1, policy@hint?
*atom[.<sem>][.<scope>][.<updated>].add[.noftz][.<hint>].<half>  {d}1, [a], {a}1, policy@hint?
*atom[.<sem>][.<scope>][.<updated>].(min|max)[.<hint>].(u32|s32|u64|s64)  {d}1, [a], {a}1, policy@hint?
*atom[.<sem>][.<scope>][.<updated>].(inc|dec)[.<hint>].u32  {d}1, [a], {a}1, policy@hint?
*atom[.<sem>][.<scope>][.<updated>].(and|or|xor)[.<hint>].(b32|b64)  {d}1, [a], {a}1, policy@hint?
*atom[.<sem>][.<scope>][.global].add[.<hint>].<pair>.f32  {d}@pair, [a], {a}@pair, policy@hint?
*atom[.<sem>][.<scope>][.global].(add|min|max)[.noftz][.<hint>].<pair>.(f16x2|bf16x2)
    {d}@pair, [a], {a}@pair, policy@hint?
*atom[.<sem>][.<scope>][.global].(add|min|max)[.noftz][.<hint>].<vec>.(f16|bf16)
    {d}@vec, [a], {a}@vec, policy@hint?
*atom[.<sem>][.<scope>][.<updated>].exch[.<hint>].(b32|b64|b128)  {d}1, [a], {a}1, policy@hint?
*atom[.<sem>][.<scope>][.<updated>].cas[.<hint>].(b16|b32|b64|b128)  {d}1, [a], {a}1, {a}1, policy@hint?
*red[.<sem>][.<scope>][.<updated>].add[.<hint>].(u32|s32|u64|s64|f32|f64)  [a], {a}1, policy@hint?
*red[.<sem>][.<scope>][.<updated>].add[.noftz][.<hint>].<half>  [a], {a}1, policy@hint?
*red[.<sem>][.<scope>][.<updated>].(min|max)[.<hint>].(u32|s32|u64|s64)  [a], {a}1, policy@hint?
*red[.<sem>][.<scope>][.<updated>].(inc|dec)[.<hint>].u32  [a], {a}1, policy@hint?
*red[.<sem>][.<scope>][.<updated>].(and|or|xor)[.<hint>].(b32|b64)  [a], {a}1, policy@hint?
*red[.<sem>][.<scope>][.global].add[.<hint>].<pair>.f32  [a], {a}@pair, policy@hint?
*red[.<sem>][.<scope>][.global].(add|min|max)[.noftz][.<hint>].<pair>.(f16x2|bf16x2)
    [a], {a}@pair, policy@hint?
*red[.<sem>][.<scope>][.global].(add|min|max)[.noftz][.<hint>].<vec>.(f16|bf16)  [a], {a}@vec, policy@hint?
""",
    "copies": """
cp.async.ca.<ss>.global[.<hint>][.<ahead>]  [a], [a], 4|8|16, pred/b32?, policy@hint?
cp.async.cg.<ss>.global[.<hint>][.<ahead>]  [a], [a], 16, pred/b32?, policy@hint?
cp.async.commit_group
cp.async.wait_group  imm
cp.async.wait_all
*cp.async.mbarrier.arrive[.noinc][.<ss>].b64  [a]
*cp.async.bulk.(shared::cluster|shared::cta).global.mbarrier::complete_tx::bytes[.<multicast>][.<hint>]
    [a], [a], a, [a], a@multicast, policy@hint?
*cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes  [a], [a], a, [a]
*cp.async.bulk.global.shared::cta.bulk_group[.<hint>]  [a], [a], a, policy@hint?
*cp.async.bulk.tensor.<dim>.(shared::cluster|shared::cta).global[.tile].mbarrier::complete_tx::bytes
    [.<multicast>][.<cg>][.<hint>]  [a], [a, {}], [a], a@multicast, policy@hint?
*cp.async.bulk.tensor.<dim>.global.shared::cta[.tile].bulk_group[.<hint>]  [a, {}], [a], policy@hint?
cp.async.bulk.commit_group
cp.async.bulk.wait_group[.read]  a
*cp.async.bulk.prefetch.L2.global[.<hint>]  [a], a, policy@hint?
*cp.async.bulk.prefetch.tensor.<dim>.L2.global[.tile|tile::gather4][.<hint>]  [a, {}], policy@hint?
*cp.async.bulk.prefetch.tensor.<dim>.L2.global.(im2col|im2col::w|im2col::w::128)[.<hint>]
    [a, {}], {a}, policy@hint?
*cp.reduce.async.bulk.tensor.<dim>.global.shared::cta.<reduced>[.tile].bulk_group[.<hint>]
    [a, {}], [a], policy@hint?
*cp.reduce.async.bulk.global.shared::cta.bulk_group[.<hint>].add[.noftz].(f16|bf16)
    [a], [a], a, policy@hint?
*cp.reduce.async.bulk.global.shared::cta.bulk_group[.<hint>].add.(u32|s32|u64|f32|f64)
    [a], [a], a, policy@hint?
*cp.reduce.async.bulk.global.shared::cta.bulk_group[.<hint>].(min|max).(u32|s32|u64|s64|f16|bf16)
    [a], [a], a, policy@hint?
*cp.reduce.async.bulk.global.shared::cta.bulk_group[.<hint>].(inc|dec).u32  [a], [a], a, policy@hint?
*cp.reduce.async.bulk.global.shared::cta.bulk_group[.<hint>].(and|or|xor).(b32|b64)
    [a], [a], a, policy@hint?
*cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.(u32|s32|u64)
    [a], [a], a, [a]
*cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.(min|max).(u32|s32)
    [a], [a], a, [a]
*cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.(inc|dec).u32
    [a], [a], a, [a]
*cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.(and|or|xor).b32
    [a], [a], a, [a]
*st.async[.weak][.cluster].shared::cluster.mbarrier::complete_tx::bytes[.<pair>].<stored>
    [a], {a}@pair, [a]
*red.async[.relaxed][.cluster].shared::cluster.mbarrier::complete_tx::bytes.add.(u32|s32|u64)
    [a], {a}1, [a]
*red.async[.relaxed][.cluster].shared::cluster.mbarrier::complete_tx::bytes.(min|max).(u32|s32)
    [a], {a}1, [a]
*red.async[.relaxed][.cluster].shared::cluster.mbarrier::complete_tx::bytes.(inc|dec).u32
    [a], {a}1, [a]
*red.async[.relaxed][.cluster].shared::cluster.mbarrier::complete_tx::bytes.(and|or|xor).b32
    [a], {a}1, [a]
tensormap.replace.tile.global_address[.global|shared::cta].b1024.b64  [a], a
tensormap.replace.tile.rank[.global|shared::cta].b1024.b32  [a], a
tensormap.replace.tile.(box_dim|global_dim|element_stride)[.global|shared::cta].b1024.b32  [a], imm, a
tensormap.replace.tile.global_stride[.global|shared::cta].b1024.b64  [a], imm, a
tensormap.replace.tile.(elemtype|interleave_layout|swizzle_mode|swizzle_atomicity|fill_mode)
    [.global|shared::cta].b1024.b32  [a], imm
tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.<scope>.sync.aligned  [a], [a], 128
multimem  ! multicast addresses belong to several GPUs, and one is simulated
""",
    "threads of a warp": """
shfl.sync.(up|down|bfly|idx).b32  d[|p], a, a, a, a
vote.sync.(any|all|uni).pred  p, pred, a
vote.sync.ballot.b32  d, pred, a
activemask.b32  d
match.any.sync.(b32|b64)  d, a, a
match.all.sync.(b32|b64)  d[|p], a, a
redux.sync.(add|min|max).(u32|s32)  d, a, a
redux.sync.(and|or|xor).b32  d, a, a
redux.sync.(min|max)[.abs][.NaN].f32  d, a, a
elect.sync  d[|p], a
(bar|barrier).warp.sync  a
""",
    "barriers and fences": """
*(bar|barrier)[.cta].(sync|arrive)[.aligned]  a, a?
(bar|barrier).red.(and|or)[.aligned].pred  p, a, a?, pred
(bar|barrier).red.popc[.aligned].u32  d, a, a?, pred
(bar|barrier).cta.red.(and|or)[.aligned].pred  p, a, a?, pred
(bar|barrier).cta.red.popc[.aligned].u32  d, a, a?, pred
*barrier.cluster.arrive[.release|relaxed][.aligned]
*barrier.cluster.wait[.acquire][.aligned]
*fence.(acq_rel|sc|acquire|release).<scope>
*fence.acquire.sync_restrict::shared::cluster.cluster
*fence.release.sync_restrict::shared::cta.cluster
fence.proxy.async[.global|shared::cta|shared::cluster]
fence.proxy.alias
fence.proxy.tensormap::generic.release.<scope>
fence.proxy.tensormap::generic.acquire.<scope>  [a], 128
fence.mbarrier_init.release.cluster
membar.(cta|gl|sys)
membar.proxy.alias
*mbarrier.init[.<ss>].b64  [a], a
*mbarrier.inval[.<ss>].b64  [a]
*mbarrier.(arrive|arrive_drop)[.expect_tx|noComplete][.release|relaxed][.<near>][.<sss>].b64  d?, [a], a?
*mbarrier.(expect_tx|complete_tx)[.relaxed][.<near>][.<sss>].b64  [a], a
*mbarrier.try_wait[.acquire|relaxed][.<near>][.<ss>].b64  p, [a], b64, a?
*mbarrier.try_wait.parity[.acquire|relaxed][.<near>][.<ss>].b64  p, [a], a, a?
*mbarrier.test_wait[.acquire|relaxed][.<near>][.<ss>].b64  p, [a], b64
*mbarrier.test_wait.parity[.acquire|relaxed][.<near>][.<ss>].b64  p, [a], a
""",
    "matrices": """
*ldmatrix.sync.aligned.m8n8.<x>[.trans][.<ss>].b16  {d}@x, [a]
*ldmatrix.sync.aligned.m16n16.<x12>.trans[.<ss>].b8  {d}@x12*2, [a]
*ldmatrix.sync.aligned.m16n16.<x12>.trans[.<ss>].b8x16.<spread>  {d}@x12*2, [a]
*ldmatrix.sync.aligned.m8n16.<x>[.<ss>].b8x16.<spread>  {d}@x, [a]
*stmatrix.sync.aligned.m8n8.<x>[.trans][.<ss>].b16  [a], {a}@x
*stmatrix.sync.aligned.m16n8.<x>.trans[.<ss>].b8  [a], {a}@x
movmatrix.sync.aligned.m8n8.trans.b16  d, a
mma.sync.aligned.(m16n8k8|m16n8k16).row.col.f16.f16.f16.f16  {d}, {a}, {a}, {a}
mma.sync.aligned.(m16n8k8|m16n8k16).row.col.f32.f16.f16.f32  {d}, {a}, {a}, {a}
mma.sync.aligned.(m16n8k8|m16n8k16).row.col.f32.bf16.bf16.f32  {d}, {a}, {a}, {a}
mma.sync.aligned.(m16n8k4|m16n8k8).row.col.f32.tf32.tf32.f32  {d}, {a}, {a}, {a}
mma.sync.aligned.(m16n8k16|m16n8k32).row.col[.kind::f8f6f4].f16.(e4m3|e5m2).(e4m3|e5m2).f16
    {d}, {a}, {a}, {a}
mma.sync.aligned.(m16n8k16|m16n8k32).row.col[.kind::f8f6f4].f32.(e4m3|e5m2).(e4m3|e5m2).f32
    {d}, {a}, {a}, {a}
mma.sync.aligned.(m16n8k16|m16n8k32).row.col[.satfinite].s32.(s8|u8).(s8|u8).s32  {d}, {a}, {a}, {a}
wgmma.mma_async.sync.aligned.<k16>.(f16|f32).f16.f16  {r}, a, a, pred, imm, imm, imm, imm
wgmma.mma_async.sync.aligned.<k16>.(f16|f32).f16.f16  {r}, {r}, a, pred, imm, imm, imm
wgmma.mma_async.sync.aligned.<k16>.f32.bf16.bf16  {r}, a, a, pred, imm, imm, imm, imm
wgmma.mma_async.sync.aligned.<k16>.f32.bf16.bf16  {r}, {r}, a, pred, imm, imm, imm
wgmma.mma_async.sync.aligned.<k8>.f32.tf32.tf32  {r}, a/{r}, a, pred, imm, imm
wgmma.mma_async.sync.aligned.<k32>.(f16|f32).(e4m3|e5m2).(e4m3|e5m2)  {r}, a/{r}, a, pred, imm, imm
wgmma.mma_async.sync.aligned.<k32>[.satfinite].s32.(s8|u8).(s8|u8)  {r}, a/{r}, a, pred
wgmma.(fence|commit_group).sync.aligned
wgmma.wait_group.sync.aligned  a
""",
    "tensor memory": """
*tcgen05.alloc.<cg>.sync.aligned[.<ss>].b32  [a], a
*tcgen05.dealloc.<cg>.sync.aligned.b32  a, a
*tcgen05.relinquish_alloc_permit.<cg>.sync.aligned
*tcgen05.ld.sync.aligned.(32x32b|16x64b).<n128>[.pack::16b].b32  {s}@n128, [a]
*tcgen05.ld.sync.aligned.16x128b.<n64>[.pack::16b].b32  {s}@n64*2, [a]
*tcgen05.ld.sync.aligned.16x256b.<n32>[.pack::16b].b32  {s}@n32*4, [a]
*tcgen05.ld.sync.aligned.16x32bx2.<n128>[.pack::16b].b32  {s}@n128, [a], imm
*tcgen05.st.sync.aligned.(32x32b|16x64b).<n128>[.unpack::16b].b32  [a], {s}@n128
*tcgen05.st.sync.aligned.16x128b.<n64>[.unpack::16b].b32  [a], {s}@n64*2
*tcgen05.st.sync.aligned.16x256b.<n32>[.unpack::16b].b32  [a], {s}@n32*4
*tcgen05.st.sync.aligned.16x32bx2.<n128>[.unpack::16b].b32  [a], imm, {s}@n128
tcgen05.wait::ld.sync.aligned
tcgen05.wait::st.sync.aligned
tcgen05.fence::before_thread_sync
tcgen05.fence::after_thread_sync
*tcgen05.cp.<cg>.(128x256b|128x128b|4x256b)[.b8x16.<spread>]  [a], a
*tcgen05.cp.<cg>.64x128b.(warpx2::02_13|warpx2::01_23)[.b8x16.<spread>]  [a], a
*tcgen05.cp.<cg>.32x128b.warpx4[.b8x16.<spread>]  [a], a
*tcgen05.commit.<cg>.mbarrier::arrive::one[.shared::cluster][.<multicast>].b64  [a], a@multicast
*tcgen05.mma.<cg>.(kind::f16|kind::tf32)[.<a>]  [a], a/[a], a, a, {s}4/{s}8?, pred, imm?
*tcgen05.mma.<cg>.(kind::f8f6f4|kind::i8)[.<a>]  [a], a/[a], a, a, {s}4/{s}8?, pred
*tcgen05.mma.<cg>.kind::mxf8f6f4.block_scale[.block32|scale_vec::1X][.<a>]
    [a], a/[a], a, a, [a], [a], pred
*tcgen05.mma.<cg>.kind::mxf4.block_scale[.block32|scale_vec::2X][.<a>]  [a], a/[a], a, a, [a], [a], pred
*tcgen05.mma.<cg>.kind::mxf4nvf4.block_scale.(block16|block32|scale_vec::2X|scale_vec::4X)[.<a>]
    [a], a/[a], a, a, [a], [a], pred
*tcgen05.mma.ws.cta_group::1.(kind::f16|kind::tf32|kind::f8f6f4|kind::i8)[.<b>]
    [a], a/[a], a, a, pred, a?
""",
    "launches": """
griddepcontrol.(launch_dependents|wait)
*clusterlaunchcontrol.try_cancel.async[.shared::cta].mbarrier::complete_tx::bytes
    [.multicast::cluster::all].b128  [a], [a]
clusterlaunchcontrol.query_cancel.is_canceled.pred.b128  p, a
clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128  {d}4, a
clusterlaunchcontrol.query_cancel.(get_first_ctaid::x|get_first_ctaid::y|get_first_ctaid::z).b32.b128  d, a
setmaxnreg.(inc|dec).sync.aligned.u32  imm
pmevent[.mask]  imm
nanosleep.u32  a
(trap|brkpt)
""",
}


@lru_cache(maxsize=1)
def _by_name() -> dict[str, list[str]]:
    """Texts of rows by the first word of their opcodes."""
    found: dict[str, list[str]] = {}
    for section in ROWS.values():
        for text in syntax.rows(section):
            for name in re.match(r"\*?\(?([\w|]+)", text)[1].split("|"):  # type: ignore[index]
                found.setdefault(name, []).append(text)
    return found


@lru_cache(maxsize=256)
def rows(name: str) -> tuple[syntax.Row, ...]:
    """Rows of the opcodes that begin with this word."""
    return tuple(row for text in _by_name().get(name, ()) for row in syntax.parsed(text, SETS))
