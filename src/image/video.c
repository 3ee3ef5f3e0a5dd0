/* video.c - what ffprobe says of a file, the frames ffmpeg gives, and how they are sampled. Rules:
 * the Qwen3-VL video processor of transformers. */
#include "image/video.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/file.h"
#include "base/json.h"
#include "base/mem.h"
#include "image/decode.h"

extern char **environ;

#define UNKNOWN_FPS 24.0
#define MAX_SIDE 32768

/* ---- a program and what it writes ---- */

typedef struct {
    const char *name;
    pid_t pid;
    int out, err;
    char text[300]; /* the begin of stderr */
    size_t text_len;
} program;

static ith_status program_start(program *p, const char *const *argv, ith_error *err)
{
    int out[2], errs[2];
    posix_spawn_file_actions_t actions;
    *p = (program){.name = argv[0]};
    if (pipe2(out, O_CLOEXEC) != 0)
        return ith_fail(err, ITH_ERR_IO, "%s: pipe: %s", argv[0], strerror(errno));
    if (pipe2(errs, O_CLOEXEC) != 0) {
        close(out[0]);
        close(out[1]);
        return ith_fail(err, ITH_ERR_IO, "%s: pipe: %s", argv[0], strerror(errno));
    }
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&actions, errs[1], STDERR_FILENO);
    int failed =
        posix_spawnp(&p->pid, argv[0], &actions, NULL, (char *const *)(uintptr_t)argv, environ);
    posix_spawn_file_actions_destroy(&actions);
    close(out[1]);
    close(errs[1]);
    p->out = out[0];
    p->err = errs[0];
    if (!failed)
        return ITH_OK;
    close(p->out);
    close(p->err);
    return ith_fail(err, ITH_ERR_UNSUPPORTED,
                    "videos are read by the programs ffmpeg and ffprobe: %s: %s (install ffmpeg)",
                    argv[0], strerror(failed));
}

/* Bytes of stdout; stderr is drained meanwhile, so that neither side waits. *got 0: the end. */
static ith_status program_read(program *p, void *to, int64_t size, int64_t *got, ith_error *err)
{
    for (;;) {
        struct pollfd fds[] = {{p->out, POLLIN, 0}, {p->err, POLLIN, 0}};
        if (poll(fds, p->err >= 0 ? 2 : 1, -1) < 0 && errno != EINTR)
            return ith_fail(err, ITH_ERR_IO, "%s: %s", p->name, strerror(errno));
        if (p->err >= 0 && fds[1].revents) {
            char spare[256];
            ssize_t n = read(p->err, spare, sizeof spare);
            if (n <= 0) {
                close(p->err);
                p->err = -1;
            }
            for (ssize_t i = 0; i < n && p->text_len + 1 < sizeof p->text; i++)
                p->text[p->text_len++] = spare[i];
            continue;
        }
        if (!fds[0].revents)
            continue;
        ssize_t n = read(p->out, to, (size_t)size);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return ith_fail(err, ITH_ERR_IO, "%s: %s", p->name, strerror(errno));
        *got = n;
        return ITH_OK;
    }
}

static ith_status program_read_all(program *p, void *to, int64_t size, bool *ended, ith_error *err)
{
    for (int64_t done = 0, got = 0; done < size; done += got) {
        ITH_TRY(program_read(p, (char *)to + done, size - done, &got, err));
        if (got == 0) {
            *ended = true;
            return ITH_OK;
        }
    }
    *ended = false;
    return ITH_OK;
}

/* Its exit status; what it complained about is the text of the failure. */
static ith_status program_end(program *p, bool stop, ith_error *err)
{
    int state = 0;
    if (stop)
        kill(p->pid, SIGKILL);
    close(p->out);
    if (p->err >= 0)
        close(p->err);
    while (waitpid(p->pid, &state, 0) < 0 && errno == EINTR)
        ;
    if (stop || (WIFEXITED(state) && WEXITSTATUS(state) == 0))
        return ITH_OK;
    p->text[strcspn(p->text, "\n")] = '\0';
    return ith_fail(err, ITH_ERR_FORMAT, "%s: %s", p->name,
                    p->text[0] ? p->text : "it failed without a word");
}

/* ---- probe ---- */

static double fraction(const char *text)
{
    char *end = NULL;
    double a = text ? strtod(text, &end) : 0, b = end && *end == '/' ? strtod(end + 1, NULL) : 1;
    return b > 0 && isfinite(a / b) && a > 0 ? a / b : 0;
}

static ith_status parse_probe(ith_video_info *out, const ith_buf *text, ith_error *err)
{
    json_t *root = NULL;
    ITH_TRY(ith_json_parse(&root, text->data ? text->data : "", text->len, "ffprobe", err));
    const json_t *stream = json_array_get(json_object_get(root, "streams"), 0);
    const char *count = json_string_value(json_object_get(stream, "nb_read_packets"));
    ith_video_info v = {.width = json_integer_value(json_object_get(stream, "width")),
                        .height = json_integer_value(json_object_get(stream, "height")),
                        .num_frames = count ? strtoll(count, NULL, 10) : 0,
                        .fps =
                            fraction(json_string_value(json_object_get(stream, "avg_frame_rate")))};
    const json_t *sides = json_object_get(stream, "side_data_list");
    for (size_t i = 0; i < json_array_size(sides); i++) {
        const json_t *turn = json_object_get(json_array_get(sides, i), "rotation");
        if (json_is_number(turn) && (long)fabs(json_number_value(turn)) % 180 == 90) {
            int64_t width = v.width;
            v.width = v.height;
            v.height = width;
        }
    }
    json_decref(root);
    if (!stream)
        return ith_fail(err, ITH_ERR_FORMAT, "no video in it");
    if (v.width < 1 || v.height < 1 || v.width > MAX_SIDE || v.height > MAX_SIDE)
        return ith_fail(err, ITH_ERR_FORMAT, "a video of %lld x %lld (sides up to %d)",
                        (long long)v.width, (long long)v.height, MAX_SIDE);
    if (v.num_frames < 1 || v.num_frames > INT32_MAX)
        return ith_fail(err, ITH_ERR_FORMAT, "a video of %lld frames", (long long)v.num_frames);
    *out = v;
    return ITH_OK;
}

/* Of the stream, for probe. */
#define ENTRIES "stream=width,height,avg_frame_rate,nb_read_packets:stream_side_data=rotation"

ith_status ith_video_probe(ith_video_info *out, const char *path, ith_error *err)
{
    ith_buf url = {0}, text = {0};
    program p;
    ith_buf_init(&text, (int64_t)1 << 20);
    ith_buf_printf(&url, "file:%s", path);
    ITH_TRY(ith_buf_check(&url, "path", err));
    const char *const argv[] = {"ffprobe",       "-v",
                                "error",         "-protocol_whitelist",
                                "file",          "-select_streams",
                                "v:0",           "-count_packets",
                                "-show_entries", ENTRIES,
                                "-of",           "json",
                                url.data,        NULL};
    ith_status status = program_start(&p, argv, err);
    if (status == ITH_OK) {
        char part[4096];
        int64_t got = 0;
        do {
            status = program_read(&p, part, sizeof part, &got, err);
            ith_buf_append(&text, part, status == ITH_OK ? got : 0);
        } while (status == ITH_OK && got > 0);
        ith_error late = {0};
        ith_status ended = program_end(&p, status != ITH_OK, &late);
        if (status == ITH_OK && ended != ITH_OK)
            status = ith_fail(err, ended, "%s", late.text);
    }
    if (status == ITH_OK)
        status = ith_buf_check(&text, "ffprobe", err);
    if (status == ITH_OK)
        status = parse_probe(out, &text, err);
    ith_buf_deinit(&url);
    ith_buf_deinit(&text);
    return status == ITH_OK ? ITH_OK : ith_wrap(err, status, "%s", path);
}

/* ---- frames ---- */

/* The header of a binary PPM: "P6 WIDTH HEIGHT 255" and one blank. */
static ith_status read_header(program *p, int64_t *width, int64_t *height, bool *ended,
                              ith_error *err)
{
    int64_t numbers[3] = {0, 0, 0};
    char c[2];
    ITH_TRY(program_read_all(p, c, 2, ended, err));
    if (*ended)
        return ITH_OK;
    bool good = c[0] == 'P' && c[1] == '6';
    ITH_TRY(program_read_all(p, c, 1, ended, err));
    for (int i = 0; good && i < 3 && !*ended; i++) {
        for (;;) {
            ITH_TRY(program_read_all(p, c, 1, ended, err));
            if (*ended || c[0] < '0' || c[0] > '9' || numbers[i] > MAX_SIDE)
                break;
            numbers[i] = numbers[i] * 10 + (c[0] - '0');
        }
    }
    *width = numbers[0];
    *height = numbers[1];
    if (good && !*ended && numbers[2] == 255)
        return ITH_OK;
    return ith_fail(err, ITH_ERR_FORMAT, "ffmpeg: found something else than a PPM picture");
}

static ith_status read_frames(program *p, int64_t n,
                              ith_status (*take)(void *arg, int64_t i, const ith_image *frame),
                              void *arg, ith_error *err)
{
    for (int64_t i = 0; i < n; i++) {
        ith_image frame = {0};
        int64_t width = 0, height = 0;
        bool ended = false;
        ITH_TRY(read_header(p, &width, &height, &ended, err));
        if (ended)
            return ith_fail(err, ITH_ERR_FORMAT, "the video ends after %lld of %lld wanted frames",
                            (long long)i, (long long)n);
        ITH_TRY(ith_image_alloc(&frame, width, height, ITH_IMAGE_MAX_PIXELS, err));
        ith_status status = program_read_all(p, frame.rgb, width * height * 3, &ended, err);
        if (status == ITH_OK && ended)
            status = ith_fail(err, ITH_ERR_FORMAT, "ffmpeg: a frame is cut off");
        if (status == ITH_OK)
            status = take(arg, i, &frame);
        ith_image_deinit(&frame);
        ITH_TRY(status);
    }
    return ITH_OK;
}

ith_status ith_video_read(const char *path, const int64_t *indices, int64_t n,
                          ith_status (*take)(void *arg, int64_t i, const ith_image *frame),
                          void *arg, ith_error *err)
{
    ith_buf url = {0}, filter = {0};
    program p;
    ith_buf_printf(&url, "file:%s", path);
    ith_buf_puts(&filter, "select=");
    for (int64_t i = 0; i < n; i++)
        ith_buf_printf(&filter, "%seq(n\\,%lld)", i ? "+" : "", (long long)indices[i]);
    ith_status status = ith_buf_check(&url, "path", err);
    if (status == ITH_OK)
        status = ith_buf_check(&filter, "frames", err);
    if (status == ITH_OK) {
        const char *const argv[] = {
            "ffmpeg", "-v",        "error",  "-nostdin", "-protocol_whitelist",
            "file",   "-i",        url.data, "-map",     "0:v:0",
            "-vf",    filter.data, "-vsync", "0",        "-pix_fmt",
            "rgb24",  "-c:v",      "ppm",    "-f",       "image2pipe",
            "-",      NULL};
        status = program_start(&p, argv, err);
    }
    if (status == ITH_OK) {
        ith_error late = {0};
        status = read_frames(&p, n, take, arg, err);
        /* All frames are here: what ffmpeg still decodes is not wanted. Else its own words count.
         */
        if (program_end(&p, status == ITH_OK, &late) != ITH_OK)
            status = ith_fail(err, ITH_ERR_FORMAT, "%s", late.text);
    }
    ith_buf_deinit(&url);
    ith_buf_deinit(&filter);
    return status == ITH_OK ? ITH_OK : ith_wrap(err, status, "%s", path);
}

/* ---- sampling and size ---- */

ith_status ith_video_sample(const ith_video_processor *p, const ith_video_info *info,
                            int64_t *indices, int64_t *n, ith_error *err)
{
    double fps = info->fps > 0 ? info->fps : UNKNOWN_FPS, total = (double)info->num_frames;
    int64_t count = (int64_t)(total / fps * p->fps);
    count = ith_max_i64(ith_min_i64(count, p->max_frames), p->min_frames);
    count = ith_min_i64(count, info->num_frames);
    if (count < p->image.temporal_patch_size)
        return ith_fail(err, ITH_ERR_FORMAT, "a video of %lld frames (%lld at least)",
                        (long long)info->num_frames, (long long)p->image.temporal_patch_size);
    for (int64_t i = 0; i < count; i++)
        indices[i] = (int64_t)nearbyint((double)i * ((total - 1) / (double)(count - 1)));
    indices[count - 1] = info->num_frames - 1;
    *n = count;
    return ITH_OK;
}

ith_status ith_video_grid(const ith_video_processor *p, int64_t n, int64_t height, int64_t width,
                          ith_grid *grid, ith_error *err)
{
    const ith_image_processor *im = &p->image;
    int64_t factor = im->patch_size * im->merge_size, tp = im->temporal_patch_size;
    double f = (double)factor, h = (double)height, w = (double)width;
    if (height < factor || width < factor) {
        double up = fmax(f / h, f / w);
        height = (int64_t)(h * up);
        width = (int64_t)(w * up);
        h = (double)height;
        w = (double)width;
    }
    if (fmax(h, w) / fmin(h, w) > ITH_IMAGE_MAX_ASPECT)
        return ith_fail(err, ITH_ERR_FORMAT,
                        "a video of %lld x %lld: sides may be at most %d:1 "
                        "apart",
                        (long long)width, (long long)height, ITH_IMAGE_MAX_ASPECT);
    int64_t hb = (int64_t)nearbyint(h / f) * factor, wb = (int64_t)nearbyint(w / f) * factor;
    double tb = nearbyint((double)n / (double)tp) * (double)tp;
    if (tb * (double)hb * (double)wb > (double)im->max_pixels) {
        double beta = sqrt((double)n * h * w / (double)im->max_pixels);
        hb = ith_max_i64(factor, (int64_t)floor(h / beta / f) * factor);
        wb = ith_max_i64(factor, (int64_t)floor(w / beta / f) * factor);
    } else if (tb * (double)hb * (double)wb < (double)im->min_pixels) {
        double beta = sqrt((double)im->min_pixels / ((double)n * h * w));
        hb = (int64_t)ceil(h * beta / f) * factor;
        wb = (int64_t)ceil(w * beta / f) * factor;
    }
    *grid = (ith_grid){(int32_t)ith_div_ceil(n, tp), (int32_t)(hb / im->patch_size),
                       (int32_t)(wb / im->patch_size)};
    return ITH_OK;
}
