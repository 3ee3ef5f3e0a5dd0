/* tokenizer.c - life cycle and lookup. Reading is in bpe_file.c, encoding in bpe_encode.c. */
#include "tokenizer/tokenizer_internal.h"

void ith_ids_free(ith_ids *list)
{
    ith_free(list->ids);
    memset(list, 0, sizeof *list);
}

ith_status ith_ids_push(ith_ids *list, int32_t id, ith_error *err)
{
    ITH_TRY(ith_grow((void **)&list->ids, &list->cap, list->count + 1, 4, "token ids", err));
    list->ids[list->count++] = id;
    return ITH_OK;
}

void ith_tokenizer_close(ith_tokenizer *t)
{
    if (!t)
        return;
    for (int i = 0; i < t->num_rules; i++)
        ith_split_deinit(&t->rules[i]);
    if (t->states)
        ith_bpe_states_deinit(t->states);
    ith_free(t->states);
    ith_free(t->added);
    ith_free(t->raw_set.sorted);
    ith_free(t->norm_set.sorted);
    ith_free(t->classes);
    ith_vocab_deinit(&t->vocab);
    ith_free(t);
}

ith_status ith_tokenizer_open(ith_tokenizer **out, const char *model_dir, ith_error *err)
{
    ith_tokenizer *t;
    ITH_TRY(ith_alloc_zero((void **)&t, 1, (int64_t)sizeof *t, "a tokenizer", err));
    t->eos = t->pad = -1;
    ith_status status = ITH_OK;
    ITH_TRY_OUT(ith_alloc((void **)&t->classes, ITH_UC_TABLE_CHARS, "character classes", err));
    ith_uc_fill(t->classes);
    ITH_TRY_OUT(ith_alloc_zero((void **)&t->states, 1, (int64_t)sizeof *t->states,
                               "a tokenizer's scratch", err));
    pthread_mutex_init(&t->states->mutex, NULL);
    ITH_TRY_OUT(ith_tokenizer_load(t, model_dir, err));
    *out = t;
    return ITH_OK;
out:
    ith_tokenizer_close(t);
    return status;
}

/* Index of the added token with this id, which is one. */
static int64_t added_index(const ith_tokenizer *t, int32_t id)
{
    int64_t low = 0, high = t->num_added;
    while (low < high) {
        int64_t mid = low + (high - low) / 2;
        if (t->added[mid].id < id)
            low = mid + 1;
        else
            high = mid;
    }
    ITH_ASSERT(low < t->num_added && t->added[low].id == id);
    return low;
}

ith_status ith_tokenizer_token(const ith_tokenizer *t, int32_t id, const char **bytes, int64_t *len,
                               bool *is_added, bool *is_special)
{
    if (id < 0 || id >= t->vocab.num_rows || !t->vocab.rows[id].bytes)
        return ITH_ERR_USAGE;
    const ith_token_row *row = &t->vocab.rows[id];
    const ith_added_token *added = row->is_added ? &t->added[added_index(t, id)] : NULL;
    if (bytes)
        *bytes = added ? added->text : row->bytes;
    if (len)
        *len = added ? added->len : row->len;
    if (is_added)
        *is_added = row->is_added;
    if (is_special)
        *is_special = row->is_special;
    return ITH_OK;
}

int64_t ith_tokenizer_size(const ith_tokenizer *t)
{
    return t->vocab.num_rows;
}

int32_t ith_tokenizer_find(const ith_tokenizer *t, const char *token)
{
    for (int64_t i = 0; i < t->num_added; i++)
        if (strcmp(t->added[i].text, token) == 0)
            return t->added[i].id;
    return ith_vocab_find_spelling(&t->vocab, token, (int64_t)strlen(token));
}

int32_t ith_tokenizer_eos(const ith_tokenizer *t)
{
    return t->eos;
}

int32_t ith_tokenizer_pad(const ith_tokenizer *t)
{
    return t->pad;
}

const char *ith_tokenizer_hash(const ith_tokenizer *t)
{
    return t->hash;
}

int64_t ith_tokenizer_num_added(const ith_tokenizer *t)
{
    return t->num_added;
}

void ith_tokenizer_added(const ith_tokenizer *t, int64_t i, const char **text, int32_t *id,
                         bool *special)
{
    ITH_ASSERT(i >= 0 && i < t->num_added);
    if (text)
        *text = t->added[i].text;
    if (id)
        *id = t->added[i].id;
    if (special)
        *special = t->added[i].special;
}
