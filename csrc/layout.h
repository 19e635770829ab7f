/* This file lays out the memory that the ranks of one group share: what lies where, and which rank may write it.
 *
 *   0        header                 written once by the leader; then only `poison`, `failure` and the sync
 *   rank 0   control block          written by rank 0 only (but for the sleeper counts)
 *            stage[0], stage[1]     two phases of outgoing bytes
 *            stage[2]               what the rank writes once it knows that the group is over; nobody reads it
 *   rank 1   ...
 *   channel (src, dst) for all pairs: a ring of bytes, head written by src, tail by dst
 *
 * A phase is one use of a stage. Stage t & 1 belongs to phase t and is written again in phase t + 2. Every phase holds at
 * least one sync (all arrive, all wait) after its writes, and a rank arrives in phase t + 1 only when it has read all
 * that it needs from phase t. So whoever passed the sync of phase t + 1 knows that nobody reads the stage of phase t any
 * more. The same argument covers `call` and `table`, which alternate with the stages. It asks that a rank's phases come one
 * after the other, in the order of its program's calls, whichever thread takes them: what takes a phase by itself while
 * another thread still has some to take (the allocation of shared memory, the building of a reducer) waits for these first.
 *
 * A phase may be left open (early.h): a rank goes on before it has waited at the phase's sync. It waits there before it
 * begins another phase, so whatever it writes, it has passed the syncs of all phases before; nothing above changes.
 */
#ifndef PLX_LAYOUT_H
#define PLX_LAYOUT_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define PLX_MAGIC 0x31584e414c414850ull /* "PHALANX1", little endian */
#define PLX_VERSION 7u
#define PLX_LINE 128u /* two cache lines: the adjacent-line prefetcher couples them */
#define PLX_PAGE 4096u
#ifndef PLX_MAX_WORLD /* a checker needs few */
#define PLX_MAX_WORLD 1024u
#endif
#define PLX_RECORDS 128u
#define PLX_CALL_SITES 256u
#define PLX_CALL_SITE_BYTES 128u
#define PLX_MAX_DIMS 5u
#define PLX_BLOCKS 4096u
#define PLX_FAILURE_BYTES 3072u
#define PLX_UNTOLD 0u /* a value of `failure_state` */
#define PLX_TELLING 1u
#define PLX_TOLD 2u

/* This is one operation as a rank sees it. All ranks' calls of one sequence number must agree in the fields marked (=). */
struct plx_call {
  uint64_t seq;    /* (=) number of the operation in the group, from 1 */
  uint64_t count;  /* (=) elements per rank, as the operation counts them */
  uint64_t digest; /* (=) of uneven sizes, 0 when even; or what else must be the same */
  uint64_t heap;   /* offset of the tensor in the caller's own heap, or PLX_NO_HEAP */
  uint16_t kind;   /* (=) enum plx_kind */
  uint8_t dtype;   /* (=) enum plx_dtype */
  uint8_t redop;   /* (=) enum plx_redop */
  int32_t root;    /* (=) -1 where there is none */
  uint32_t flags;
  uint32_t call_site; /* index of "file:line" in the rank's table */
  uint64_t spare[2];
};
_Static_assert(sizeof(struct plx_call) == 64, "a call is one cache line");

#define PLX_NO_HEAP UINT64_MAX
#define PLX_FLAG_SPLITS 1u /* all_to_all: the sizes are in the table */

/* This is one line of the flight recorder. */
struct plx_record {
  _Atomic uint64_t seq; /* 0: never used; written last on entry */
  uint64_t count;
  uint64_t enter_ns; /* CLOCK_MONOTONIC */
  _Atomic uint64_t leave_ns; /* 0 while the operation runs */
  uint16_t kind;
  uint8_t dtype;
  uint8_t redop;
  int32_t root;
  int32_t peer; /* point to point: the other rank; else -1 */
  uint32_t call_site;
  uint32_t status;
  uint32_t ndim;
  uint64_t shape[PLX_MAX_DIMS];
  uint64_t flags;
  uint64_t spare[3];
};
_Static_assert(sizeof(struct plx_record) == 128, "a record is one line");

struct plx_header {
  uint64_t magic;
  uint32_t version;
  uint32_t world;
  uint64_t total_bytes;
  uint64_t rank_offset; /* the offset of rank 0's block; a multiple of the page */
  uint64_t rank_stride;
  uint64_t stage_bytes;
  uint64_t channel_offset;
  uint64_t channel_stride;
  uint64_t channel_bytes; /* a power of two */
  uint32_t oversubscribed; /* more ranks than cores: sleep at once, wake everybody once */
  uint32_t reserved;

  /* This is 0, or what ended the group: the code in the low byte, above it the rank that caused or saw it. It is set
   * once. */
  _Alignas(PLX_LINE) _Atomic uint64_t poison;

  /* This is the sync for oversubscribed groups: the last of `world` arrivals opens it. */
  _Alignas(PLX_LINE) _Atomic uint64_t arrivals;
  _Alignas(PLX_LINE) _Atomic uint32_t synced; /* low half of the last step that everybody reached; a futex */
  _Atomic uint32_t sync_sleepers;

  /* This says why the group is over, in words of the first rank that said so: all that hear of the end hear the same,
   * also when that rank has gone. It is written before `poison`, by the rank that took `failure_state` from PLX_UNTOLD. */
  _Alignas(PLX_LINE) _Atomic uint32_t failure_state;
  char failure[PLX_FAILURE_BYTES]; /* UTF-8, zero-terminated */
};
_Static_assert(sizeof(struct plx_header) <= PLX_PAGE, "the header is one page");

enum plx_life { PLX_ABSENT = 0, PLX_JOINED = 1, PLX_LEFT = 2 };

struct plx_rank {
  _Alignas(PLX_LINE) _Atomic uint64_t step; /* syncs reached; its low half is a futex */
  _Alignas(PLX_LINE) _Atomic uint32_t sleepers; /* ranks asleep on `step` */
  _Alignas(PLX_LINE) _Atomic uint32_t bell; /* futex: something arrived on one of my channels */
  _Atomic uint32_t bell_sleepers;
  _Alignas(PLX_LINE) struct plx_call call[2];
  _Alignas(PLX_LINE) _Atomic uint32_t life;
  int32_t pid;
  uint64_t start_ticks; /* /proc/PID/stat field 22: tells a reused pid */
  _Atomic uint64_t finished; /* sequence number of the last collective that returned */
  /* While the rank's program waits for long at the end of a round of gradients, this is 1 + where its reducer lies;
   * above the round's number stands that of the reducer's buckets, which is written first. Else it is 0. */
  _Atomic uint64_t ending;
  _Atomic uint64_t ending_round;
  _Atomic uint64_t next_record;
  _Atomic uint32_t num_call_sites;
  char exit_reason[192]; /* last words: why the process is leaving, UTF-8, zero-terminated */
  _Alignas(PLX_LINE) struct plx_record records[PLX_RECORDS];
  char call_sites[PLX_CALL_SITES][PLX_CALL_SITE_BYTES]; /* "file:line" strings, written once each */
  _Atomic uint8_t released[PLX_BLOCKS];  /* heap blocks that this rank has let go */
};

struct plx_channel {
  _Alignas(PLX_LINE) _Atomic uint64_t head; /* bytes ever written, by src */
  _Alignas(PLX_LINE) _Atomic uint64_t tail; /* bytes ever read, by dst */
  _Alignas(PLX_LINE) _Atomic uint32_t head_sleepers;
  _Atomic uint32_t tail_sleepers;
  _Alignas(PLX_LINE) unsigned char data[];
};

enum plx_kind {
  PLX_BARRIER = 1,
  PLX_BROADCAST,
  PLX_ALL_REDUCE,
  PLX_REDUCE,
  PLX_ALL_GATHER,
  PLX_GATHER,
  PLX_SCATTER,
  PLX_REDUCE_SCATTER,
  PLX_ALL_TO_ALL,
  PLX_SEND,
  PLX_RECV,
  PLX_GRADIENTS, /* one round of a reducer of buckets */
  PLX_BROADCAST_BUFFERS, /* a broadcast whose root waits for nobody */
  PLX_NUM_KINDS
};

enum plx_dtype {
  PLX_BYTES = 0, /* moved, never reduced */
  PLX_BOOL,
  PLX_U8,
  PLX_I8,
  PLX_U16,
  PLX_I16,
  PLX_U32,
  PLX_I32,
  PLX_U64,
  PLX_I64,
  PLX_F16,
  PLX_BF16,
  PLX_F32,
  PLX_F64,
  PLX_C64,
  PLX_C128,
  PLX_NUM_DTYPES
};

enum plx_redop {
  PLX_SUM = 0,
  PLX_AVG,
  PLX_PRODUCT,
  PLX_MIN,
  PLX_MAX,
  PLX_BAND,
  PLX_BOR,
  PLX_BXOR,
  PLX_NUM_REDOPS
};

/* An operation returns one of these; it is also the low byte of `poison`. */
enum plx_status {
  PLX_OK = 0,
  PLX_MISMATCH = 1,    /* ranks called different things; nothing was changed */
  PLX_PEER_LOST = 2,   /* a rank's process is gone, or it left the group */
  PLX_DEADLINE = 3,    /* time ran out */
  PLX_INTERRUPTED = 4, /* a signal handler raised in this rank */
  PLX_INVALID = 5,     /* arguments that no world could make right; nothing was published */
  PLX_NO_MEMORY = 6,
  PLX_CLOSED = 7 /* this process left the group, or is a fork of a rank */
};

/* Return the bytes of shared memory for a group; 0 when the arguments make no sense. */
size_t plx_group_bytes(uint32_t world, size_t stage_bytes, size_t channel_bytes);
/* Write the header into zeroed memory. Only the leader does, before any other rank maps it. */
int plx_group_format(void *base, uint32_t world, size_t stage_bytes, size_t channel_bytes, int oversubscribed);
/* Check a mapping's magic, version and size. */
int plx_group_check(const void *base, size_t bytes);

#endif
