#!/usr/bin/env bash
# Rows with images from nothing to a trained model: init, data, train, resume, freeze. Demands: packed batches have
# the loss and gradient of separate ones, a resumed run writes the bytes of the uninterrupted one, frozen parts
# keep theirs, wrong rows are one line that names file and row.
#   test_multimodal.sh PROGRAM
set -euo pipefail
ithaca=$1
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
fail() {
    echo "FAILED: $*" >&2
    exit 1
}
"$ithaca" env 2>/dev/null | grep -q "pictures.*png" || { echo "skipped: PNG is not built in"; exit 77; }

mkdir "$dir/pictures"
# 64 x 32 and 32 x 48, palette
base64 -d >"$dir/pictures/wide.png" <<<"iVBORw0KGgoAAAANSUhEUgAAAEAAAAAgBAMAAABQs2O3AAAAGFBMVEW8y6K8jI08y2I8jE28UHm8F2Y8UDk8FyYqgKziAAAAVklEQVR4nGMsZ0AF99D4TAwEAMkK/lFsAgZgQeb8/8DwH40PU/D/A1SMEY3PwPIezUh0/pALh78XGBgYBVD5UAVn4YL/0fgMjMZoRo6mBwgYkumBcgUAVGkiJd2F53gAAAAASUVORK5CYII="
base64 -d >"$dir/pictures/tall.png" <<<"iVBORw0KGgoAAAANSUhEUgAAACAAAAAwBAMAAACCgmVcAAAAGFBMVEW6zaG6jo06zWE6jk26Unm6GWU6Ujk6GSV+XyAdAAAAZ0lEQVR4nNWRywmAMBBE38p2ZHFWGUgFtmAaiOshE5DcxIA4l8fOfmAZ22jaxYVBL4xzwo0iHt7QS3AgCpiI37sAy1B//UsWkwPUjIk4kIAQ8arhTlu1PCGoGb90RcslSog/zOWBcQGREisJ0x8zZwAAAABJRU5ErkJggg=="
cat >"$dir/data.jsonl" <<'END'
{"messages": [{"role": "user", "content": "<image>What is this?"}, {"role": "assistant", "content": "A wide thing."}], "images": ["pictures/wide.png"]}
{"messages": [{"role": "user", "content": [{"type": "image_url", "value": "pictures/tall.png"}, {"type": "text", "value": "And this?"}]}, {"role": "assistant", "content": [{"type": "text", "value": "A tall one."}]}, {"role": "user", "content": [{"type": "text", "value": "Compare "}, {"type": "image_url", "value": "pictures/wide.png"}]}, {"role": "assistant", "content": [{"type": "text", "value": "Wider."}]}]}
{"messages": [{"role": "user", "content": "No picture here."}, {"role": "assistant", "content": "Right."}]}
{"conversations": 0, "messages": [{"role": "user", "content": "Two: <image><image>"}, {"role": "assistant", "content": "Both."}], "images": ["pictures/tall.png", "pictures/wide.png"]}
END
"$ithaca" init "$dir/m" --size qwen3.5-tiny --learn "$dir/data.jsonl" --vocab-size 320 --dtype float32 >/dev/null
echo "{}" >"$dir/empty.yaml"
keys=("model=$dir/m" "train_dataset=$dir/data.jsonl" cutoff_len=256 device=cpu dtype=float32 learning_rate=0.002)

# ---- what the data looks like ----
"$ithaca" data "$dir/empty.yaml" "${keys[@]}" -n 9 >"$dir/shown" 2>"$dir/log" || fail "data: $(cat "$dir/log")"
grep -q "^image 1: .*pictures/wide.png: 2 x 4 patches, 2 tokens" "$dir/shown" || fail "data: $(head -5 "$dir/shown")"
grep -q "<|vision_start|>|<|image_pad|> x 2|<|vision_end|>" "$dir/shown" || fail "data shows no run: $(head -5 "$dir/shown")"
grep -q "^5 samples" "$dir/shown" || fail "data: $(tail -2 "$dir/shown")"

"$ithaca" plan "$dir/empty.yaml" "${keys[@]}" "output_dir=$dir/o" micro_batch_size=2 >"$dir/shown" 2>&1 || fail "plan: $(cat "$dir/shown")"
grep -q "documents with 32 patches of images and videos" "$dir/shown" || fail "plan: $(tail -n 3 "$dir/shown")"

# ---- packed = separate: one step over all samples ----
train() { # train OUT key=value ...
    local out=$1
    shift
    "$ithaca" train "$dir/empty.yaml" "${keys[@]}" "output_dir=$dir/$out" "$@" >"$dir/log" 2>&1 ||
        fail "$out: $(tail -n 3 "$dir/log")"
}
step_of() { grep -o '"loss": [0-9.]*, "grad_norm": [0-9.]*' "$dir/$1/trainer_log.jsonl" | tail -n 1; }
train one max_steps=1 micro_batch_size=1 global_batch_size=5
train packed max_steps=1 micro_batch_size=5 batching_strategy=packing
awk -v a="$(step_of one)" -v b="$(step_of packed)" 'BEGIN {
    split(a, x, /[ ,]+/); split(b, y, /[ ,]+/);
    for (i = 2; i <= 4; i += 2) { d = x[i] - y[i]; if (d < 0) d = -d; if (x[i] == 0 || d > 1e-5 * x[i]) exit 1 } }' ||
    fail "packed: $(step_of packed), separate: $(step_of one)"

# Names, types and shapes are those of the source, model.language_model. and model.visual. included.
header() {
    local size
    size=$(od -An -t u8 -N 8 "$1/model.safetensors" | tr -d ' ')
    head -c $((size + 8)) "$1/model.safetensors" | tail -c +9 | grep -o '"[^"]*":{"dtype":"[^"]*","shape":[^]]*\]' | sort
}
[ "$(header "$dir/m" | grep -c '"model.visual\.\|"model.language_model\.')" -gt 20 ] || fail "few names: $(header "$dir/m" | head -3)"
[ "$(header "$dir/m")" = "$(header "$dir/packed")" ] || fail "other tensors: $(diff <(header "$dir/m") <(header "$dir/packed") | head -3)"

# ---- resume ----
train whole max_steps=4 micro_batch_size=2 save_steps=2 data_cache_dir="$dir/cache"
cp "$dir/whole/model.safetensors" "$dir/bytes"
rm -rf "$dir/whole/checkpoint-4"
train whole max_steps=4 micro_batch_size=2 save_steps=2 data_cache_dir="$dir/cache" \
    "resume_from_checkpoint=$dir/whole/checkpoint-2"
grep -q "(cached)" "$dir/log" || fail "the cache of media samples was not used"
cmp "$dir/bytes" "$dir/whole/model.safetensors" || fail "the resumed run differs"

# ---- frozen parts keep their bytes, the others do not ----
tensor() { # tensor FILE NAME: its bytes in hexadecimal
    local size at
    size=$(od -An -t u8 -N 8 "$1" | tr -d ' ')
    at=$(head -c $((size + 8)) "$1" | tail -c +9 |
        sed "s/.*\"$2\":{[^}]*\"data_offsets\":\[\([0-9]*\),\([0-9]*\)\].*/\1 \2/")
    tail -c +$((size + 9 + ${at% *})) "$1" | head -c $((${at#* } - ${at% *})) | od -An -t x1 | tr -d ' \n'
}
tower=model.visual.blocks.0.mlp.linear_fc1.weight
merger=model.visual.merger.linear_fc1.weight
text=model.language_model.embed_tokens.weight
changed() { # changed OUT: which of the three differ from the start
    local name
    for name in $tower $merger $text; do
        [ "$(tensor "$dir/m/model.safetensors" $name)" = "$(tensor "$dir/$1/model.safetensors" $name)" ] || printf '%s ' "${name%%.linear_fc1*}"
    done
}
a=${tower%%.linear_fc1*} b=${merger%%.linear_fc1*} c=${text}
[ "$(changed packed)" = "$a $b $c " ] || fail "training changed '$(changed packed)'"
train tower max_steps=1 micro_batch_size=5 freeze_vision_tower=true
[ "$(changed tower)" = "$b $c " ] || fail "freeze_vision_tower changed '$(changed tower)'"
grep 'No picture' "$dir/data.jsonl" >"$dir/text.jsonl"
train textonly "train_dataset=$dir/text.jsonl" max_steps=1
[ "$(changed textonly)" = "$c " ] || fail "text alone changed '$(changed textonly)'"
train merger max_steps=1 micro_batch_size=5 freeze_vision_tower=true freeze_language_model=true
[ "$(changed merger)" = "$b " ] || fail "freeze_language_model changed '$(changed merger)'"
train language max_steps=1 micro_batch_size=5 freeze_multi_modal_projector=true freeze_language_model=true
[ "$(changed language)" = "$a " ] || fail "freeze_multi_modal_projector changed '$(changed language)'"

# ---- the model learns to tell pictures apart, and says so: generate, a file of prompts, chat ----
cat >"$dir/learn.jsonl" <<'END'
{"messages": [{"role": "user", "content": "<image>Which?"}, {"role": "assistant", "content": "Wide."}], "images": "pictures/wide.png"}
{"messages": [{"role": "user", "content": "<image>Which?"}, {"role": "assistant", "content": "Tall."}], "images": "pictures/tall.png"}
{"messages": [{"role": "user", "content": "<image><image>Which?"}, {"role": "assistant", "content": "Both."}], "images": ["pictures/wide.png", "pictures/tall.png"]}
{"messages": [{"role": "user", "content": "<image>Which?"}, {"role": "assistant", "content": "Wide."}, {"role": "user", "content": "<image>Which?"}, {"role": "assistant", "content": "Tall."}], "images": ["pictures/wide.png", "pictures/tall.png"]}
{"messages": [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "None."}]}
END
train learned "train_dataset=$dir/learn.jsonl" max_steps=70 micro_batch_size=6 batching_strategy=packing learning_rate=0.004
answer() { "$ithaca" generate "$dir/learned" --device cpu --temperature 0 -n 9 -p "Which?" "$@" 2>/dev/null; }
wide=$dir/pictures/wide.png tall=$dir/pictures/tall.png
[ "$(answer -i "$wide")" = Wide. ] || fail "wide: $(answer -i "$wide")"
[ "$(answer --image "$tall")" = Tall. ] || fail "tall: $(answer -i "$tall")"
[ "$(answer -i "$wide" -i "$tall")" = Both. ] || fail "both: $(answer -i "$wide" -i "$tall")"
[ "$(answer)" = None. ] || fail "none: $(answer)"
cat >"$dir/ask.jsonl" <<'END'
{"messages": [{"role": "user", "content": [{"type": "image", "path": "pictures/tall.png"}, {"type": "text", "text": "Which?"}]}]}
{"messages": [{"role": "user", "content": "Which?"}]}
{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "pictures/wide.png"}}, {"type": "text", "text": "Which?"}]}]}
{"messages": [{"role": "user", "content": "<image><image>Which?"}], "images": ["pictures/wide.png", "pictures/tall.png"]}
{"messages": [{"role": "user", "content": "<image>Which?"}, {"role": "assistant", "content": "Wide."}, {"role": "user", "content": "<image>Which?"}], "images": ["pictures/wide.png", "pictures/tall.png"]}
END
printf '{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,%s"}}, {"type": "text", "text": "Which?"}]}]}\n' \
    "$(base64 -w 0 <"$tall")" >>"$dir/ask.jsonl"
for batch in 1 3; do
    got=$("$ithaca" generate "$dir/learned" "$dir/ask.jsonl" --device cpu --temperature 0 -n 9 -b $batch 2>/dev/null |
        sed 's/.*"answer": "\([^"]*\)".*/\1/' | tr '\n' ' ')
    [ "$got" = "Tall. None. Wide. Both. Tall. Tall. " ] || fail "batches of $batch: $got"
done
got=$(printf 'Which?\n/image %s\nWhich?\n/clear\nWhich?\n/image none.png\n' "$tall" |
    "$ithaca" chat "$dir/learned" --device cpu --temperature 0 -n 9 -i "$wide" 2>/dev/null | grep -v "^$" | tr '\n' ' ')
[ "$got" = "Wide. ($tall comes with the next message) Tall. None. (none.png: no such file here or beside the data (media_dir says where to look)) " ] ||
    fail "chat: $got"
if "$ithaca" generate "$dir/learned" -p "Which?" -i "$dir/ask.jsonl" >"$dir/log" 2>&1; then fail "a text was taken for a picture"; fi
grep -q "^error: .*ask.jsonl: no picture of a known format" "$dir/log" || fail "no picture: $(cat "$dir/log")"

# ---- videos, where ffmpeg is ----
if command -v ffmpeg >/dev/null && command -v ffprobe >/dev/null &&
    ffmpeg -v error -f lavfi -i testsrc=size=64x48:rate=4:duration=3 -c:v mpeg4 "$dir/pictures/film.mp4" </dev/null 2>/dev/null; then
    printf '{"messages": [{"role": "user", "content": "<video>Which?"}, {"role": "assistant", "content": "Film."}], "videos": "pictures/film.mp4"}\n' >"$dir/film.jsonl"
    "$ithaca" data "$dir/empty.yaml" "${keys[@]}" "train_dataset=$dir/film.jsonl" >"$dir/shown" 2>&1
    # 12 frames at 4 a second: 6 of them, 0 2 4 7 9 11
    grep -q "^video 1: .*film.mp4: 3 x 4 x 4 patches, 12 tokens" "$dir/shown" || fail "video: $(cat "$dir/shown")"
    tr -d '|\n' <"$dir/shown" | grep -q "<0.2 seconds><vision_start><video_pad> x 4<vision_end><1.4 seconds>.*<2.5 seconds>" ||
        fail "video: $(cat "$dir/shown")"
    cat "$dir/learn.jsonl" >>"$dir/film.jsonl"
    train film "train_dataset=$dir/film.jsonl" max_steps=2 micro_batch_size=7 batching_strategy=packing
    head -c 2000 "$dir/pictures/film.mp4" >"$dir/pictures/cut.mp4"
    printf '{"messages": [{"role": "user", "content": "<video>?"}, {"role": "assistant", "content": "no"}], "videos": "pictures/cut.mp4"}\n' >"$dir/film.jsonl"
    if "$ithaca" data "$dir/empty.yaml" "${keys[@]}" "train_dataset=$dir/film.jsonl" >"$dir/shown" 2>&1; then fail "a cut video was taken"; fi
    grep -q "^error: .*an image or video that cannot be read (first: .*cut.mp4: ffprobe: " "$dir/shown" || fail "cut video: $(cat "$dir/shown")"
fi

# ---- wrong rows ----
refused() { # refused ROW TEXT [key=value ...]: training on the row ends with one line that holds the text
    local text=$2
    printf '%s\n' "$1" >"$dir/wrong.jsonl"
    shift 2
    if "$ithaca" train "$dir/empty.yaml" "${keys[@]}" "train_dataset=$dir/wrong.jsonl" "output_dir=$dir/w" "$@" \
        >"$dir/log" 2>&1; then fail "not refused: $text"; fi
    grep -q "^error: .*$text" "$dir/log" || fail "wanted '$text', got: $(tail -n 2 "$dir/log")"
}
row() { # row TEXT IMAGES
    printf '{"messages": [{"role": "user", "content": "%s"}, {"role": "assistant", "content": "yes"}], "images": %s}' "$1" "$2"
}
refused "$(row '<image>?' '["none.png"]')" "row 1 (line 1): none.png: no such file here or beside the data (media_dir"
refused "$(row '<image>?' '["https://a.b/c.png"]')" "https://a.b/c.png: only files are read"
refused "$(row '<image><image>hi' '["pictures/wide.png"]')" "row 1.*: 2 placeholders <image>, but 1 image in images"
refused "$(row '<image>?' '["data:image/png;base64,!!"]')" "1 of 1 row dropped: .*data: URI: '!' is no base64"
refused "$(row '<image>?' '["data:image/png;base64,iVBORw0K"]')" "1 of 1 row dropped: .*data: URI: no picture of a known format"
head -c 60 "$dir/pictures/wide.png" >"$dir/pictures/cut.png"
refused "$(row '<image>?' '["pictures/cut.png"]')" "1 of 1 row dropped: an image or video that cannot be read (first: .*row 1.*damaged PNG"
refused "$(row '<image>?' '["pictures/wide.png"]')" "no sample is left.*no trainable token within cutoff_len" cutoff_len=12
refused "$(row 'hm' 'null')" "all parts of the model are frozen" freeze_vision_tower=true freeze_multi_modal_projector=true freeze_language_model=true
cp -r "$dir/m" "$dir/m8"
sed -i 's/"patch_size": 16/"patch_size": 8/' "$dir/m8/preprocessor_config.json" "$dir/m8/video_preprocessor_config.json"
refused "$(row 'hm' 'null')" "makes patches of 384 values, vision_config of config.json wants 1536" "model=$dir/m8"
# a tokenizer without image tokens: text trains, images are told
cp -r "$dir/m" "$dir/mt"
sed -i 's/"image_token_id": [0-9]*/"image_token_id": 5/' "$dir/mt/config.json"
train other "model=$dir/mt" "train_dataset=$dir/text.jsonl" max_steps=1
refused "$(row '<image>?' '["pictures/wide.png"]')" "image_token_id of config.json is 5, which is no added token" "model=$dir/mt"
# a broken picture beside good rows is dropped, counted and named
{ cat "$dir/data.jsonl"; row '<image>?' '["pictures/cut.png"]'; echo; } >"$dir/mixed.jsonl"
"$ithaca" data "$dir/empty.yaml" "${keys[@]}" "train_dataset=$dir/mixed.jsonl" >"$dir/shown" 2>/dev/null
grep -q "^1 of 5 rows dropped: an image or video that cannot be read (first: .*row 5 (line 5): .*cut.png: damaged PNG" "$dir/shown" ||
    fail "a broken picture: $(tail -n 2 "$dir/shown")"
# found in media_dir, by path and by its bare name
mkdir "$dir/elsewhere"
row '<image>?' '["no/such/folder/wide.png"]' >"$dir/elsewhere/far.jsonl"
"$ithaca" data "$dir/empty.yaml" "${keys[@]}" "train_dataset=$dir/elsewhere/far.jsonl" "media_dir=$dir/pictures" >"$dir/shown" 2>&1 ||
    fail "media_dir: $(tail -n 1 "$dir/shown")"
# LlamaFactory's limit comes before the processor's: 64 x 32 becomes 45 x 22, and that 32 x 32
"$ithaca" data "$dir/empty.yaml" "${keys[@]}" "train_dataset=$dir/elsewhere/far.jsonl" "media_dir=$dir/pictures" image_max_pixels=1024 >"$dir/shown" 2>&1
grep -q "wide.png: 2 x 2 patches, 1 token" "$dir/shown" || fail "image_max_pixels: $(grep image "$dir/shown")"
# A screen of 1920 x 1080 under the published limits: 2040 tokens, 576 where LlamaFactory's limit comes before; text that
# is cut ends before a picture, never inside of it, so that nothing is left to train here.
cp -r "$dir/m" "$dir/large"
sed -i 's/"longest_edge": 65536/"longest_edge": 16777216/; s/"shortest_edge": 1024/"shortest_edge": 65536/' "$dir/large/preprocessor_config.json"
base64 -d >"$dir/pictures/screen.png" <<<"iVBORw0KGgoAAAANSUhEUgAAB4AAAAQ4AQAAAADAqPzuAAABE0lEQVR42u3BAQ0AAADCoPdPbQ8HFAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAwKcB+OUAAfzhj/4AAAAASUVORK5CYII="
row '<image>?' '["pictures/screen.png"]' >"$dir/screen.jsonl"
screen() { "$ithaca" data "$dir/empty.yaml" "model=$dir/large" "train_dataset=$dir/screen.jsonl" "$@" >"$dir/shown" 2>&1; }
screen cutoff_len=4096 && grep -q "screen.png: 68 x 120 patches, 2040 tokens" "$dir/shown" || fail "screen: $(grep image "$dir/shown")"
screen cutoff_len=4096 image_max_pixels=589824 && grep -q "screen.png: 36 x 64 patches, 576 tokens" "$dir/shown" ||
    fail "screen with image_max_pixels: $(grep image "$dir/shown")"
if screen cutoff_len=1024; then fail "a picture was cut: $(tail -n 1 "$dir/shown")"; fi
grep -q "^error: .*1 of 1 sample dropped: no trainable token within cutoff_len" "$dir/shown" || fail "cut screen: $(tail -n 1 "$dir/shown")"
echo ok
