/* media.h - images and videos of rows: what they cost in tokens, the text that stands for them,
 * their patches and positions.
 *
 * An image becomes h/m * w/m image tokens between <|vision_start|> and <|vision_end|>, m = merge
 * size. A video becomes, for each temporal patch, "<S seconds>" (the mean time of its frames, one
 * decimal), then its tokens likewise; nothing stands around all of it (LlamaFactory's form).
 *
 * A path is looked for in media_dir, from the working folder, beside the data file, in the folder
 * above it, and last by its bare name in media_dir or beside the file. An image may also be a data:
 * URI in base64, which is kept where others keep their path. */
#ifndef ITH_DATA_MEDIA_H
#define ITH_DATA_MEDIA_H

#include "image/video.h"
#include "tokenizer/tokenizer.h"

#include "base/json.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Ids; -1: the model has none. image and video are those of config.json; ith_media_open finds
 * vision_start in the tokenizer. */
typedef struct {
    int32_t image, video, vision_start;
    int64_t merge; /* spatial_merge_size */
} ith_media_tokens;

typedef struct {
    const char *model_dir; /* preprocessor_config.json, video_preprocessor_config.json */
    const char *media_dir; /* or NULL */
    const ith_tokenizer *tokenizer;
    ith_media_tokens tokens;
    /* LlamaFactory's: pictures are brought into these areas before the processor sees them, with
     * sides cut to integers. 0: not asked for. */
    int64_t image_max_pixels, image_min_pixels, video_max_pixels, video_min_pixels;
    double video_fps;     /* frames a second; 0: the model's */
    int64_t video_maxlen; /* most frames; 0: the model's */
} ith_media_options;

/* Immutable after open: any number of threads may use it. */
typedef struct ith_media ith_media;
ith_status ith_media_open(ith_media **out, const ith_media_options *options, ith_error *err);
void ith_media_close(ith_media *media); /* NULL is fine */
/* What decides tokens and patches, as a line of text: part of cache keys. */
const char *ith_media_settings(const ith_media *media);
const ith_media_tokens *ith_media_ids(const ith_media *media);
/* Values of a patch. */
int64_t ith_media_patch_width(const ith_media *media);

/* An image, or a video (num_frames > 0). */
typedef struct {
    int64_t path; /* offset in a text of NUL-terminated paths */
    ith_grid grid;
    int32_t num_frames; /* of the file */
    double fps;         /* of the file; 0: not said */
    int64_t frames;     /* of a stored sample: its first one in the list of them (samples.h) */
} ith_media_item;

/* Items and paths of a row. Zero-initialise. */
typedef struct {
    ith_media_item *items;
    int64_t count, cap;
    ith_buf paths;
} ith_media_list;
void ith_media_list_deinit(ith_media_list *list);
/* Copies the items of another list to the end. */
ith_status ith_media_list_append(ith_media_list *list, const ith_media_list *from, ith_error *err);
/* Looks at the file of every media block of canonical messages, appends an item for each, and
 * writes into the block what stands for it (tokenizer/chat.h). Images are decoded, so that a
 * damaged one is found here: ITH_ERR_FORMAT. A missing file is ITH_ERR_IO. data_file: the file of
 * the row, NULL: none. */
ith_status ith_media_prepare(const ith_media *media, json_t *messages, const char *data_file,
                             ith_media_list *list, ith_error *err);
/* Media blocks of messages[0, cut); cut 0: all. */
int64_t ith_media_count(const json_t *messages, int64_t cut);
/* Reads the file again: pixels [patches, width] f32. Fails when the file has changed its size. */
ith_status ith_media_load(const ith_media *media, const ith_media_item *item, const char *path,
                          float *pixels, ith_error *err);

/* Features of an item: the tokens that stand for it, frame by frame. */
int64_t ith_media_features(const ith_media_tokens *tokens, ith_grid grid);

/* Where to cut ids [from, n) so that at most `limit` are left and no item is cut through; *num: how
 * many of the items, whose tokens begin at `from`, are whole before it. */
ith_status ith_media_cut(const ith_media_tokens *tokens, const int32_t *ids, int64_t n,
                         int64_t from, int64_t limit, const ith_media_item *items,
                         int64_t num_items, int64_t *end, int64_t *num, ith_error *err);

/* Whether a token stands for a part of an image or video. */
static inline bool ith_is_media_token(const ith_media_tokens *tokens, int32_t id)
{
    return id >= 0 && (id == tokens->image || id == tokens->video);
}

/* Frames of packed documents (an image is one, a video has one for each t of its grid): frames[k]
 * is the first of the rows that stand for the k-th. Fails when runs of media tokens and grids do
 * not fit. */
ith_status ith_media_find(const ith_media_tokens *tokens, const int32_t *ids,
                          const int32_t *cu_seqlens, int64_t num_docs, const ith_grid *grids,
                          int64_t num_grids, int32_t *frames, ith_error *err);

/* Three position rows [3,T] (time, height, width) of packed documents, each counting from 0: text
 * advances all three; an image stands at one time, its features at their row and column, and the
 * text goes on behind the longer side. merge: spatial_merge_size. ranges: rows [r[0], r[1]) and
 * [r[2], r[3]) are set, the others are not; NULL: all. */
void ith_mrope_positions(int64_t merge, const int32_t *cu_seqlens, int64_t num_docs,
                         const ith_grid *grids, int64_t num_grids, const int32_t *frames,
                         const int64_t *ranges, int32_t *positions);

#ifdef __cplusplus
}
#endif
#endif
