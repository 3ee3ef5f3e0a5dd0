/* convert_media.c - <image>, <video> and <audio> tags in text, and the files they stand for.
 * Invariant: tags take the files of their kind in document order, and nothing is left over. */
#include "data/convert_internal.h"

#include <string.h>

typedef struct {
    const char *column, *tag, *block, *one, *many;
} media_row;

static const media_row media[MEDIA_KINDS] = {
    [MEDIA_IMAGE] = {"images", "<image>", "image_url", "image", "images"},
    [MEDIA_VIDEO] = {"videos", "<video>", "video_url", "video", "videos"},
    [MEDIA_AUDIO] = {"audios", "<audio>", "audio_url", "audio", "audios"},
};

ith_status conv_media_begin(conversion *c)
{
    for (int k = 0; k < MEDIA_KINDS; k++) {
        json_t *column = conv_get(c->row, media[k].column);
        if (!column)
            continue;
        c->has_columns = true;
        c->files[k] = column;
        if (json_is_string(column)) {
            c->num_files[k] = 1;
            continue;
        }
        if (!json_is_array(column))
            return conv_drop(c, ITH_DROP_TYPE, "%s: found %s, expected a path or a list of paths",
                             media[k].column, ith_json_type_name(column));
        c->num_files[k] = (int64_t)json_array_size(column);
        for (int64_t i = 0; i < c->num_files[k]; i++) {
            const json_t *item = json_array_get(column, (size_t)i);
            if (!json_is_string(item))
                return conv_drop(c, ITH_DROP_TYPE, "%s[%lld]: found %s, expected a path",
                                 media[k].column, (long long)i, ith_json_type_name(item));
        }
    }
    return ITH_OK;
}

void conv_media_rewind(conversion *c)
{
    memset(c->num_tags, 0, sizeof c->num_tags);
}

/* The first tag in text, or NULL. */
static const char *next_tag(const char *text, const char *end, media_kind *kind)
{
    for (const char *p = text; (p = memchr(p, '<', (size_t)(end - p))) != NULL; p++) {
        for (int k = 0; k < MEDIA_KINDS; k++) {
            size_t n = strlen(media[k].tag);
            if ((size_t)(end - p) >= n && memcmp(p, media[k].tag, n) == 0) {
                *kind = (media_kind)k;
                return p;
            }
        }
    }
    return NULL;
}

/* Tags beyond the files are only counted: conv_media_end tells both numbers. */
static ith_status take_file(conversion *c, json_t *content, media_kind kind)
{
    int64_t i = c->num_tags[kind]++;
    if (i >= c->num_files[kind])
        return ITH_OK;
    c->out->has_media = true;
    json_t *column = c->files[kind];
    json_t *path = json_is_string(column) ? column : json_array_get(column, (size_t)i);
    return conv_block(c, content, media[kind].block, path);
}

ith_status conv_media_text(conversion *c, json_t *content, json_t *text)
{
    const char *p = json_string_value(text), *end = p + json_string_length(text);
    media_kind kind;
    const char *tag = next_tag(p, end, &kind);
    if (!tag)
        return conv_block(c, content, "text", text);
    for (; tag; tag = next_tag(p, end, &kind)) {
        if (tag > p)
            ITH_TRY(conv_block_text(c, content, "text", p, (size_t)(tag - p)));
        ITH_TRY(take_file(c, content, kind));
        p = tag + strlen(media[kind].tag);
    }
    return p < end ? conv_block_text(c, content, "text", p, (size_t)(end - p)) : ITH_OK;
}

ith_status conv_media_end(conversion *c)
{
    for (int k = 0; k < MEDIA_KINDS; k++) {
        int64_t tags = c->num_tags[k], files = c->num_files[k];
        if (tags != files)
            return ith_fail(c->err, ITH_ERR_FORMAT, "%lld placeholder%s %s, but %lld %s in %s",
                            (long long)tags, tags == 1 ? "" : "s", media[k].tag, (long long)files,
                            files == 1 ? media[k].one : media[k].many, media[k].column);
    }
    return ITH_OK;
}
