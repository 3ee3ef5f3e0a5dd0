/* tokenizer.h - byte-level BPE as the models' own files define it.
 *
 * Reads tokenizer.json, or vocab.json + merges.txt, and tokenizer_config.json of a model directory.
 * Ids equal those of the HF tokenizers library with add_special_tokens=False: text -> added tokens
 * -> NFC -> split rule -> bytes -> merges. Nothing is added at either end; post-processors are not
 * run. What a file asks for and is not built (another model type, normalizer, byte_fallback ...) is
 * an error at open, never an approximation.
 *
 * An open tokenizer is immutable: any number of threads may use it at once. */
#ifndef ITH_TOKENIZER_TOKENIZER_H
#define ITH_TOKENIZER_TOKENIZER_H

#include "base/mem.h"

typedef struct ith_tokenizer ith_tokenizer;

/* Growable list of ids or offsets. Zero-initialise; ith_ids_free. */
typedef struct {
    int32_t *ids;
    int64_t count, cap;
} ith_ids;
void ith_ids_free(ith_ids *list);
ith_status ith_ids_push(ith_ids *list, int32_t id, ith_error *err);

ith_status ith_tokenizer_open(ith_tokenizer **out, const char *model_dir, ith_error *err);
void ith_tokenizer_close(ith_tokenizer *t); /* NULL is fine */

/* Appends the ids of text to out. Added tokens are recognised in the text. text must be valid
 * UTF-8; NUL bytes are ordinary. On failure out keeps its old count. */
ith_status ith_tokenizer_encode(const ith_tokenizer *t, const char *text, int64_t len, ith_ids *out,
                                ith_error *err);
/* Also appends, for each token, the bytes [begin, end) of the original text it came from. A token
 * that holds part of a character has the range of the whole character; a character composed by NFC
 * has the range of all it was composed from. begins and ends may be NULL; len below 2^31. */
ith_status ith_tokenizer_encode_offsets(const ith_tokenizer *t, const char *text, int64_t len,
                                        ith_ids *out, ith_ids *begins, ith_ids *ends,
                                        ith_error *err);

/* Appends the text of n ids. Bytes that are not UTF-8 become U+FFFD, one per maximal subpart. Ids
 * without a token (rows that pad an embedding) give nothing, as in HF; a negative id is an error.
 * Added tokens give their content as it is. */
ith_status ith_tokenizer_decode(const ith_tokenizer *t, const int32_t *ids, int64_t n,
                                bool skip_special, ith_buf *out, ith_error *err);

/* Raw bytes of one token (not NUL-terminated; valid while t is open). Any out may be NULL.
 * ITH_ERR_USAGE when id has no token. */
ith_status ith_tokenizer_token(const ith_tokenizer *t, int32_t id, const char **bytes, int64_t *len,
                               bool *is_added, bool *is_special);
/* Largest id + 1. */
int64_t ith_tokenizer_size(const ith_tokenizer *t);
/* Id of a token by its text: the content of an added token, or the spelling in the vocabulary (the
 * byte alphabet: a space is written as U+0120). -1 when there is none. */
int32_t ith_tokenizer_find(const ith_tokenizer *t, const char *token);
/* eos_token and pad_token of tokenizer_config.json, -1 when none. */
int32_t ith_tokenizer_eos(const ith_tokenizer *t);
int32_t ith_tokenizer_pad(const ith_tokenizer *t);
/* SHA-256 (hex) over what decides ids: files, added tokens, Unicode versions. For cache keys. */
const char *ith_tokenizer_hash(const ith_tokenizer *t);

/* Added tokens in the order of their ids. text is NUL-terminated, valid while t is open; any out
 * may be NULL. */
int64_t ith_tokenizer_num_added(const ith_tokenizer *t);
void ith_tokenizer_added(const ith_tokenizer *t, int64_t i, const char **text, int32_t *id,
                         bool *special);

/* Streaming decode: what push and flush append, joined, equals ith_tokenizer_decode of all ids.
 * push appends only complete characters and keeps at most 3 bytes back. */
typedef struct {
    const ith_tokenizer *tokenizer;
    bool skip_special;
    char pending[4];
    int num_pending;
} ith_token_stream;
void ith_token_stream_init(ith_token_stream *s, const ith_tokenizer *t, bool skip_special);
ith_status ith_token_stream_push(ith_token_stream *s, int32_t id, ith_buf *out, ith_error *err);
ith_status ith_token_stream_flush(ith_token_stream *s, ith_buf *out, ith_error *err);

/* Learns a byte-level BPE from text (UTF-8) with the split rule of Qwen3 and writes tokenizer.json
 * and tokenizer_config.json into out_dir. Deterministic: equal pair counts go to the smaller pair
 * of ids. vocab_size counts everything: 256 bytes, merges, special tokens; the result is smaller
 * when the text has no pair left that occurs twice. Special tokens get the last ids; those spelled
 * <|...|> are marked special, others (<think>) are kept by skip_special decoding. eos_token is
 * <|im_end|> when given, else the first; pad_token <|endoftext|> when given, else the first. */
ith_status ith_bpe_train(const char *text, int64_t len, int64_t vocab_size,
                         const char *const *special, int64_t num_special, const char *out_dir,
                         ith_error *err);

#endif
