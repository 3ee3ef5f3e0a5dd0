/* media.c - settings, files, and the text that stands for images and videos.
 * Invariant: prepare and load derive size and frames of a file by the same functions. */
#include "data/media.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "base/file.h"

#define VISION_START "<|vision_start|>"
#define VISION_END "<|vision_end|>"

struct ith_media {
    ith_media_tokens tokens;
    ith_media_options options; /* media_dir is our copy, the other pointers are not kept */
    char *media_dir;
    ith_image_processor image;
    ith_video_processor video;
    ith_buf image_token, video_token; /* as text */
    ith_buf video_placeholder;
    char settings[512];
};

/* ---- open ---- */

/* Stays empty where the tokenizer has no such token: a model directory that is used for text alone
 * may have a tokenizer of its own. */
static ith_status token_text(const ith_tokenizer *tok, int32_t id, ith_buf *out, ith_error *err)
{
    const char *bytes = NULL;
    int64_t len = 0;
    bool added = false;
    if (id >= 0 && ith_tokenizer_token(tok, id, &bytes, &len, &added, NULL) == ITH_OK && added)
        ith_buf_append(out, bytes, len);
    return ith_buf_check(out, "media token", err);
}

static ith_status open_media(ith_media *m, const ith_media_options *o, ith_error *err)
{
    m->tokens = o->tokens;
    m->tokens.vision_start = ith_tokenizer_find(o->tokenizer, VISION_START);
    m->options = *o;
    m->options.model_dir = NULL;
    m->options.tokenizer = NULL;
    if (o->media_dir) {
        m->media_dir = ith_strndup(o->media_dir, (int64_t)strlen(o->media_dir));
        if (!m->media_dir)
            return ith_fail(err, ITH_ERR_MEMORY, "out of memory for media");
    }
    m->options.media_dir = m->media_dir;
    ITH_TRY(ith_image_processor_load(&m->image, o->model_dir, err));
    ITH_TRY(ith_video_processor_load(&m->video, o->model_dir, err));
    if (o->video_fps > 0)
        m->video.fps = o->video_fps;
    if (o->video_maxlen > 0) {
        m->video.max_frames = o->video_maxlen;
        m->video.min_frames = ith_min_i64(m->video.min_frames, o->video_maxlen);
    }
    if (m->image.merge_size != o->tokens.merge || m->video.image.merge_size != o->tokens.merge ||
        ith_image_patch_width(&m->image) != ith_image_patch_width(&m->video.image))
        return ith_fail(err, ITH_ERR_FORMAT,
                        "%s: the processor files and vision_config differ in patch_size, "
                        "temporal_patch_size or merge_size",
                        o->model_dir);
    ITH_TRY(token_text(o->tokenizer, o->tokens.image, &m->image_token, err));
    ITH_TRY(token_text(o->tokenizer, o->tokens.video, &m->video_token, err));
    m->tokens.image = m->image_token.len ? o->tokens.image : -1;
    m->tokens.video = m->video_token.len ? o->tokens.video : -1;
    ith_buf_printf(&m->video_placeholder, "%s%s%s", VISION_START,
                   m->video_token.len ? m->video_token.data : "", VISION_END);
    ITH_TRY(ith_buf_check(&m->video_placeholder, "media", err));
    const ith_image_processor *i = &m->image, *v = &m->video.image;
    snprintf(m->settings, sizeof m->settings,
             "patch %" PRId64 " %" PRId64 " %" PRId64 " image %" PRId64 "-%" PRId64
             " video %" PRId64 "-%" PRId64 " %" PRId64 "-%" PRId64 " frames %.17g fps, first "
             "%" PRId64 "-%" PRId64 " %" PRId64 "-%" PRId64 " dir %.200s",
             i->patch_size, i->temporal_patch_size, i->merge_size, i->min_pixels, i->max_pixels,
             v->min_pixels, v->max_pixels, m->video.min_frames, m->video.max_frames, m->video.fps,
             o->image_min_pixels, o->image_max_pixels, o->video_min_pixels, o->video_max_pixels,
             o->media_dir ? o->media_dir : "");
    return ITH_OK;
}

ith_status ith_media_open(ith_media **out, const ith_media_options *options, ith_error *err)
{
    ith_media *m = NULL;
    ITH_TRY(ith_alloc_zero((void **)&m, 1, sizeof *m, "media", err));
    ith_status status = open_media(m, options, err);
    if (status == ITH_OK)
        *out = m;
    else
        ith_media_close(m);
    return status;
}

void ith_media_close(ith_media *m)
{
    if (!m)
        return;
    ith_buf_deinit(&m->image_token);
    ith_buf_deinit(&m->video_token);
    ith_buf_deinit(&m->video_placeholder);
    ith_free(m->media_dir);
    ith_free(m);
}

const char *ith_media_settings(const ith_media *m)
{
    return m->settings;
}

const ith_media_tokens *ith_media_ids(const ith_media *m)
{
    return &m->tokens;
}

int64_t ith_media_patch_width(const ith_media *m)
{
    return ith_image_patch_width(&m->image);
}

void ith_media_list_deinit(ith_media_list *list)
{
    ith_free(list->items);
    ith_buf_deinit(&list->paths);
    *list = (ith_media_list){0};
}

/* ---- files ---- */

/* "data:image/png;base64,...": the file itself. */
static bool is_data_uri(const char *path)
{
    return strncmp(path, "data:", 5) == 0;
}

/* For messages. */
static const char *name_of(const char *path)
{
    return is_data_uri(path) ? "data: URI" : path;
}

static ith_status decode_data_uri(const char *uri, ith_buf *out, ith_error *err)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const char *p = strstr(uri, ";base64,");
    uint32_t bits = 0;
    int count = 0;
    if (!p)
        return ith_fail(err, ITH_ERR_FORMAT, "data: URI: no ';base64,' in it");
    for (p += 8; *p && *p != '='; p++) {
        const char *digit = strchr(digits, *p);
        if (!digit)
            return ith_fail(err, ITH_ERR_FORMAT, "data: URI: '%c' is no base64", *p);
        bits = bits << 6 | (uint32_t)(digit - digits);
        if (++count % 4 == 0)
            for (int shift = 16; shift >= 0; shift -= 8)
                ith_buf_putc(out, (char)(bits >> shift & 0xff));
    }
    for (int left = count % 4 - 1, shift = 6 * (count % 4) - 8; left > 0; left--, shift -= 8)
        ith_buf_putc(out, (char)(bits >> shift & 0xff));
    return ith_buf_check(out, "data: URI", err);
}

/* Where a path is; NULL when nowhere. */
static const char *find_file(const ith_media *m, const char *data_file, const char *path,
                             ith_buf *found)
{
    ith_buf folder = {0}, above = {0};
    const char *base = ith_path_base(path), *result = NULL;
    if (is_data_uri(path)) {
        ith_buf_puts(found, path);
        return found->data;
    }
    if (data_file) {
        int64_t n = ith_path_base(data_file) - data_file;
        ith_buf_append(&folder, data_file, n > 1 ? n - 1 : n);
        ith_path_join(&above, folder.len ? folder.data : ".", "..");
    }
    const char *beside = data_file ? (folder.len ? folder.data : ".") : NULL;
    const char *const tries[][2] = {{m->media_dir, path}, {".", path},          {beside, path},
                                    {above.data, path},   {m->media_dir, base}, {beside, base}};
    for (size_t i = 0; i < sizeof tries / sizeof *tries && !result; i++) {
        if (!tries[i][0])
            continue;
        if (strcmp(tries[i][0], ".") == 0)
            ith_path_join(found, "", tries[i][1]);
        else
            ith_path_join(found, tries[i][0], tries[i][1]);
        if (!found->failed && ith_path_exists(found->data) && !ith_path_is_dir(found->data))
            result = found->data;
    }
    ith_buf_deinit(&folder);
    ith_buf_deinit(&above);
    return result;
}

static ith_status not_found(const ith_media *m, const char *path, ith_error *err)
{
    if (strstr(path, "://"))
        return ith_fail(err, ITH_ERR_IO, "%.100s: only files are read (download it first)", path);
    if (m->media_dir)
        return ith_fail(err, ITH_ERR_IO, "%.300s: no such file in %.300s, here or beside the data",
                        path, m->media_dir);
    return ith_fail(err, ITH_ERR_IO,
                    "%.300s: no such file here or beside the data (media_dir says where to look)",
                    path);
}

/* One of LlamaFactory's two steps: the picture into at most, or at least, an area. */
static ith_status bring_to(ith_image *image, int64_t area, bool at_most, ith_error *err)
{
    double w = (double)image->width, h = (double)image->height;
    if (area <= 0 ||
        (at_most ? image->width * image->height <= area : image->width * image->height >= area))
        return ITH_OK;
    double factor = sqrt((double)area / (w * h));
    int64_t width = ith_max_i64((int64_t)(w * factor), 1);
    int64_t height = ith_max_i64((int64_t)(h * factor), 1);
    ith_image sized = {0};
    ITH_TRY(ith_image_resize(&sized, image, height, width, ITH_RESIZE_PILLOW, err));
    ith_image_deinit(image);
    *image = sized;
    return ITH_OK;
}

/* Size after both steps, without a picture. */
static void size_after(int64_t *width, int64_t *height, int64_t max, int64_t min)
{
    const struct {
        int64_t area;
        bool at_most;
    } steps[] = {{max, true}, {min, false}};
    for (int i = 0; i < 2; i++) {
        int64_t now = *width * *height;
        if (steps[i].area <= 0 || (steps[i].at_most ? now <= steps[i].area : now >= steps[i].area))
            continue;
        double factor = sqrt((double)steps[i].area / ((double)*width * (double)*height));
        *width = ith_max_i64((int64_t)((double)*width * factor), 1);
        *height = ith_max_i64((int64_t)((double)*height * factor), 1);
    }
}

static ith_status load_image(const ith_media *m, const char *path, ith_image *image, ith_error *err)
{
    ith_buf bytes = {0};
    ith_status status = ITH_OK;
    if (is_data_uri(path)) {
        status = decode_data_uri(path, &bytes, err);
        if (status == ITH_OK)
            status = ith_image_decode(image, bytes.data ? bytes.data : "", bytes.len, name_of(path),
                                      ITH_IMAGE_MAX_PIXELS, err);
        ith_buf_deinit(&bytes);
    } else {
        status = ith_image_load(image, path, ITH_IMAGE_MAX_PIXELS, err);
    }
    if (status != ITH_OK)
        return status;
    status = bring_to(image, m->options.image_max_pixels, true, err);
    if (status == ITH_OK)
        status = bring_to(image, m->options.image_min_pixels, false, err);
    if (status != ITH_OK)
        ith_image_deinit(image);
    return status;
}

/* Which frames of a video are taken; *indices is the caller's to free. */
static ith_status choose_frames(const ith_media *m, int64_t num_frames, double fps,
                                int64_t **indices, int64_t *n, ith_error *err)
{
    ith_video_info info = {.num_frames = num_frames, .fps = fps};
    int64_t *list = NULL;
    ITH_TRY(ith_alloc((void **)&list, ith_max_i64(m->video.max_frames, 1) * 8, "frames", err));
    ith_status status = ith_video_sample(&m->video, &info, list, n, err);
    if (status == ITH_OK)
        *indices = list;
    else
        ith_free(list);
    return status;
}

/* ---- prepare ---- */

static void append_tokens(ith_buf *text, const ith_buf *token, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        ith_buf_append(text, token->data, token->len);
}

static ith_status prepare_image(const ith_media *m, const char *path, ith_media_item *item,
                                ith_buf *text, ith_error *err)
{
    ith_image image = {0};
    ITH_TRY(load_image(m, path, &image, err));
    ith_status status = ith_image_grid(&m->image, image.height, image.width, &item->grid, err);
    ith_image_deinit(&image);
    if (status != ITH_OK)
        return ith_wrap(err, status, "%s", name_of(path));
    append_tokens(text, &m->image_token, ith_media_features(&m->tokens, item->grid));
    return ITH_OK;
}

static ith_status prepare_video(const ith_media *m, const char *path, ith_media_item *item,
                                ith_buf *text, ith_error *err)
{
    ith_video_info info;
    int64_t *indices = NULL, n = 0, times = m->video.image.temporal_patch_size;
    ITH_TRY(ith_video_probe(&info, path, err));
    size_after(&info.width, &info.height, m->options.video_max_pixels, m->options.video_min_pixels);
    item->num_frames = (int32_t)info.num_frames;
    item->fps = info.fps;
    ith_status status = choose_frames(m, info.num_frames, info.fps, &indices, &n, err);
    if (status == ITH_OK)
        status = ith_video_grid(&m->video, n, info.height, info.width, &item->grid, err);
    double fps = info.fps > 0 ? info.fps : 24;
    for (int64_t t = 0; status == ITH_OK && t < item->grid.t; t++) {
        int64_t first = indices[t * times], last = indices[ith_min_i64((t + 1) * times, n) - 1];
        double middle = ((double)first / fps + (double)last / fps) / 2;
        ith_buf_printf(text, "<%.1f seconds>" VISION_START, middle);
        append_tokens(text, &m->video_token,
                      ith_media_features(&m->tokens, item->grid) / item->grid.t);
        ith_buf_puts(text, VISION_END);
    }
    ith_free(indices);
    return status == ITH_OK ? ITH_OK : ith_wrap(err, status, "%s", name_of(path));
}

static ith_status add_item(ith_media_list *list, ith_media_item item, const char *path,
                           ith_error *err)
{
    ITH_TRY(
        ith_grow((void **)&list->items, &list->cap, list->count + 1, sizeof item, "media", err));
    item.path = list->paths.len;
    ith_buf_append(&list->paths, path, (int64_t)strlen(path) + 1);
    list->items[list->count++] = item;
    return ith_buf_check(&list->paths, "media", err);
}

ith_status ith_media_list_append(ith_media_list *list, const ith_media_list *from, ith_error *err)
{
    for (int64_t i = 0; i < from->count; i++)
        ITH_TRY(add_item(list, from->items[i], from->paths.data + from->items[i].path, err));
    return ITH_OK;
}

/* 'i', 'v', 'a' of a media block, 0 of another. */
static char media_kind(const json_t *block)
{
    const char *type = json_string_value(json_object_get(block, "type"));
    bool is_media = type && (strcmp(type, "image_url") == 0 || strcmp(type, "video_url") == 0 ||
                             strcmp(type, "audio_url") == 0);
    return is_media ? type[0] : '\0';
}

static ith_status prepare_block(const ith_media *m, json_t *block, char kind, const char *data_file,
                                ith_media_list *list, ith_error *err)
{
    const char *path = json_string_value(json_object_get(block, "value"));
    ith_buf found = {0}, text = {0};
    ith_media_item item = {0};
    bool video = kind == 'v';
    if (path && strncmp(path, "file://", 7) == 0)
        path += 7;
    if (kind == 'a')
        return ith_fail(err, ITH_ERR_FORMAT, "the model reads no audio");
    if (!(video ? m->video_token.len : m->image_token.len))
        return ith_fail(
            err, ITH_ERR_FORMAT,
            "%s_token_id of config.json is %d, which is no added token of the tokenizer",
            video ? "video" : "image", video ? m->options.tokens.video : m->options.tokens.image);
    if (video && path && is_data_uri(path))
        return ith_fail(err, ITH_ERR_FORMAT, "data: URI: videos are read from files only");
    ith_status status = path && find_file(m, data_file, path, &found)
                            ? ITH_OK
                            : not_found(m, path ? path : "", err);
    if (status == ITH_OK)
        status = video ? prepare_video(m, found.data, &item, &text, err)
                       : prepare_image(m, found.data, &item, &text, err);
    if (status == ITH_OK)
        status = ith_buf_check(&text, "media tokens", err);
    if (status == ITH_OK)
        status = add_item(list, item, found.data, err);
    if (status == ITH_OK &&
        (json_object_set_new(
             block, "placeholder",
             json_string(video ? m->video_placeholder.data : m->image_token.data)) != 0 ||
         json_object_set_new(block, "text", json_stringn(text.data, (size_t)text.len)) != 0))
        status = ith_fail(err, ITH_ERR_MEMORY, "out of memory for media tokens");
    ith_buf_deinit(&found);
    ith_buf_deinit(&text);
    return status;
}

ith_status ith_media_prepare(const ith_media *m, json_t *messages, const char *data_file,
                             ith_media_list *list, ith_error *err)
{
    for (size_t i = 0; i < json_array_size(messages); i++) {
        json_t *content = json_object_get(json_array_get(messages, i), "content");
        for (size_t k = 0; json_is_array(content) && k < json_array_size(content); k++) {
            json_t *block = json_array_get(content, k);
            char kind = media_kind(block);
            if (kind)
                ITH_TRY(prepare_block(m, block, kind, data_file, list, err));
        }
    }
    return ITH_OK;
}

int64_t ith_media_count(const json_t *messages, int64_t cut)
{
    int64_t n = 0, end = cut ? cut : (int64_t)json_array_size(messages);
    for (int64_t i = 0; i < end; i++) {
        const json_t *content = json_object_get(json_array_get(messages, (size_t)i), "content");
        for (size_t k = 0; json_is_array(content) && k < json_array_size(content); k++)
            n += media_kind(json_array_get(content, k)) != '\0';
    }
    return n;
}

/* ---- load ---- */

static ith_status check_grid(ith_grid found, ith_grid wanted, ith_error *err)
{
    if (found.t == wanted.t && found.h == wanted.h && found.w == wanted.w)
        return ITH_OK;
    return ith_fail(err, ITH_ERR_FORMAT,
                    "%d x %d x %d patches, %d x %d x %d when the data was read (has the file "
                    "changed? remove the cache of tokenized data)",
                    found.t, found.h, found.w, wanted.t, wanted.h, wanted.w);
}

static ith_status load_image_patches(const ith_media *m, const ith_media_item *item,
                                     const char *path, float *pixels, ith_error *err)
{
    ith_image image = {0};
    ith_grid grid;
    ITH_TRY(load_image(m, path, &image, err));
    ith_status status = ith_image_grid(&m->image, image.height, image.width, &grid, err);
    if (status == ITH_OK)
        status = check_grid(grid, item->grid, err);
    if (status == ITH_OK)
        status = ith_image_fill_patches(&m->image, &image, grid, 0, m->image.temporal_patch_size,
                                        pixels, err);
    ith_image_deinit(&image);
    return status == ITH_OK ? ITH_OK : ith_wrap(err, status, "%s", name_of(path));
}

typedef struct {
    const ith_media *media;
    const ith_media_item *item;
    int64_t num_frames;
    float *pixels;
    ith_error *err;
} frame_sink;

static ith_status take_frame(void *arg, int64_t i, const ith_image *frame)
{
    frame_sink *s = arg;
    const ith_media_options *o = &s->media->options;
    ith_image copy = {frame->width, frame->height, NULL};
    int64_t slots = s->item->grid.t * s->media->video.image.temporal_patch_size;
    int64_t times = i + 1 == s->num_frames ? slots - i : 1; /* the last one fills what is left */
    ITH_TRY(ith_alloc((void **)&copy.rgb, frame->width * frame->height * 3, "frame", s->err));
    memcpy(copy.rgb, frame->rgb, (size_t)(frame->width * frame->height * 3));
    ith_status status = bring_to(&copy, o->video_max_pixels, true, s->err);
    if (status == ITH_OK)
        status = bring_to(&copy, o->video_min_pixels, false, s->err);
    if (status == ITH_OK)
        status = ith_image_fill_patches(&s->media->video.image, &copy, s->item->grid, i, times,
                                        s->pixels, s->err);
    ith_image_deinit(&copy);
    return status;
}

static ith_status load_video_patches(const ith_media *m, const ith_media_item *item,
                                     const char *path, float *pixels, ith_error *err)
{
    int64_t *indices = NULL, n = 0;
    ITH_WRAP(choose_frames(m, item->num_frames, item->fps, &indices, &n, err), err, "%s", path);
    frame_sink sink = {m, item, n, pixels, err};
    ith_status status = ith_div_ceil(n, m->video.image.temporal_patch_size) == item->grid.t
                            ? ith_video_read(path, indices, n, take_frame, &sink, err)
                            : ith_fail(err, ITH_ERR_FORMAT, "%s: %" PRId64 " frames for %d times",
                                       path, n, item->grid.t);
    ith_free(indices);
    return status;
}

ith_status ith_media_load(const ith_media *m, const ith_media_item *item, const char *path,
                          float *pixels, ith_error *err)
{
    return item->num_frames ? load_video_patches(m, item, path, pixels, err)
                            : load_image_patches(m, item, path, pixels, err);
}
