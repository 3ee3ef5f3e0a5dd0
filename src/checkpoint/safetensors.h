/* safetensors.h - weight files of Hugging Face models: read by mapping, written as a stream.
 *
 * A file is an 8-byte little-endian header length, a JSON header
 *     {"__metadata__":{"format":"pt"},"NAME":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},..}
 * and the data, to which the offsets are relative. A model is one file, or shards with an index
 * (STEM.safetensors.index.json: {"metadata":{"total_size":N},"weight_map":{NAME:FILE}}).
 *
 * The reader trusts nothing: header length against the file, dtype x shape = bytes, offsets inside
 * the file, no overlap, no hole, no byte left over, no name twice, index and shards naming the same
 * tensors. After ith_st_open succeeds every entry can be read without a check. A file must not be
 * shortened while it is mapped (the system then ends the process with SIGBUS): the writer never
 * rewrites in place. */
#ifndef ITH_CHECKPOINT_SAFETENSORS_H
#define ITH_CHECKPOINT_SAFETENSORS_H

#include "base/file.h"
#include "comm/comm.h"
#include "tensor/tensor.h"

#define ITH_ST_MAX_DIMS 8
#define ITH_ST_MAX_HEADER_BYTES ((int64_t)1 << 30)
#define ITH_ST_SHARD_BYTES ((int64_t)4000000000) /* default shard limit */

/* A tensor in a file, or one declared for writing (then data and bytes are not read). */
typedef struct {
    const char *name;
    ith_dtype dtype;
    int ndim; /* 0: a scalar, one element */
    int64_t shape[ITH_ST_MAX_DIMS];
    int64_t bytes;    /* product of shape x dtype size */
    const void *data; /* in the mapping; ANY alignment: memcpy out of it unless aligned */
    int64_t file_idx; /* shard it lies in */
} ith_st_entry;

/* Elements of an entry. */
int64_t ith_st_numel(const ith_st_entry *entry);
/* True when dtype, ndim and shape are as given. */
bool ith_st_has_shape(const ith_st_entry *entry, int ndim, const int64_t *shape);
/* "[3, 4] BF16" for error texts. */
const char *ith_st_text(const ith_st_entry *entry, char *out, int64_t out_bytes);
/* The entry as a view, 1 <= ndim <= ITH_MAX_DIMS. Its data is read-only and may be unaligned. */
ith_tensor ith_st_view(const ith_st_entry *entry);

/* ---- reading ---- */

typedef struct ith_st_reader ith_st_reader;

/* path: a model directory (model.safetensors, else model.safetensors.index.json), an index file, or
 * one .safetensors file. */
ith_status ith_st_open(ith_st_reader **out, const char *path, ith_error *err);
/* dir/STEM.safetensors, else dir/STEM.safetensors.index.json and its shards. */
ith_status ith_st_open_stem(ith_st_reader **out, const char *dir, const char *stem, ith_error *err);
void ith_st_close(ith_st_reader *reader); /* NULL is fine; every entry dies with it */

/* Entries in the order of the files, and of the data within a file. */
int64_t ith_st_count(const ith_st_reader *reader);
const ith_st_entry *ith_st_at(const ith_st_reader *reader, int64_t i);
/* NULL when absent. */
const ith_st_entry *ith_st_find(const ith_st_reader *reader, const char *name);
/* Like find, with an error when the tensor is absent or its shape differs; `why` names what sets
 * the shape ("hidden_size"), or NULL. The error has the file without its folder, which the caller
 * names. */
ith_status ith_st_need(const ith_st_reader *reader, const char *name, int ndim,
                       const int64_t *shape, const char *why, const ith_st_entry **out,
                       ith_error *err);
/* Bytes [offset, offset + bytes) of an entry's data, read past the mapping (files larger than
 * memory). Safe on several threads. */
ith_status ith_st_read(const ith_st_reader *reader, const ith_st_entry *entry, int64_t offset,
                       void *out, int64_t bytes, ith_error *err);
/* Sum of the tensors' bytes. */
int64_t ith_st_total_bytes(const ith_st_reader *reader);
int64_t ith_st_num_files(const ith_st_reader *reader);
const char *ith_st_file_path(const ith_st_reader *reader, int64_t file_idx);
/* Value of a __metadata__ key of one file, NULL when absent. */
const char *ith_st_metadata(const ith_st_reader *reader, int64_t file_idx, const char *key);

/* ---- writing ---- */

typedef struct {
    const char *stem;        /* NULL: "model" */
    int64_t max_shard_bytes; /* of tensor data; 0: ITH_ST_SHARD_BYTES. A larger tensor gets a shard
                                of its own */
    const char *const *metadata; /* key, value, key, value, .., NULL; NULL: {"format":"pt"} */
    ith_comm *ranks; /* that write the set together, each its parts; NULL: this process alone */
} ith_st_options;

typedef struct ith_st_writer ith_st_writer;

/* All tensors are declared here (name, dtype, ndim, shape; copied), so that headers, shards and
 * every byte's place are known before the first one. Shards are filled in declared order; within a
 * shard wider types come first, then names in byte order, which keeps every tensor aligned to its
 * type and gives the very bytes that the Python library gives, whoever writes them. dir is created,
 * by rank 0; dir NULL plans only (the order and checks are the same, data is counted and dropped).
 * options may be NULL. One writer per directory and stem at a time.
 *
 * With ranks: they declare the same and all call create, meet and commit, which agree on failures:
 * every rank returns that of the lowest failing one. push and put are this rank's business. */
ith_status ith_st_writer_create(ith_st_writer **out, const char *dir, const ith_st_entry *tensors,
                                int64_t count, const ith_st_options *options, ith_error *err);
/* Index (as declared) of the tensor whose data comes next; -1 when all is there. */
int64_t ith_st_writer_next(const ith_st_writer *writer);
/* Appends data of tensor `next`; any piece size, never past its end. For a process alone. After a
 * failure only destroy is allowed. */
ith_status ith_st_writer_push(ith_st_writer *writer, const void *data, int64_t bytes,
                              ith_error *err);
/* k-th tensor (index as declared) in the order of the files, which is the fastest one to put. */
int64_t ith_st_writer_at(const ith_st_writer *writer, int64_t k);
/* Bytes [at, at + bytes) of tensor i to their place; every byte once, by one rank, in any order. */
ith_status ith_st_writer_put(ith_st_writer *writer, int64_t i, int64_t at, const void *data,
                             int64_t bytes, ith_error *err);
/* This rank has put, or failed to (status, with its text in err): what it wrote is synced. Fails
 * unless all ranks did, and put all bytes together. */
ith_status ith_st_writer_meet(ith_st_writer *writer, ith_status status, ith_error *err);
/* All data must be there. Puts the files in place, the index last, and removes files of the same
 * stem from an earlier save that the new set does not have. A kill before this call leaves the
 * directory's files as they were; a kill within it leaves the old set, the new set, or no index. */
ith_status ith_st_writer_commit(ith_st_writer *writer, ith_error *err);
/* Removes what was not committed. NULL is fine. */
void ith_st_writer_destroy(ith_st_writer *writer);

int64_t ith_st_writer_num_files(const ith_st_writer *writer);
int64_t ith_st_writer_total_bytes(const ith_st_writer *writer);

/* Whole tensors at once: entries with data. */
ith_status ith_st_write(const char *dir, const ith_st_entry *tensors, int64_t count,
                        const ith_st_options *options, ith_error *err);

#endif
