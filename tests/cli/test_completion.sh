#!/bin/sh
# Goal: bash completion offers commands, options, words of an option, configuration keys and files.
# Method: source the script the program writes and call its function as bash would.
# Arguments: the program, a directory to work in. Skips (77) without bash.
set -u
command -v bash >/dev/null || { echo 'skip: no bash here'; exit 77; }
program=$1 dir=$2/completion
mkdir -p "$dir"
touch "$dir/run.yaml"
"$program" completion bash >"$dir/script" || exit 1
cat >"$dir/check" <<'END'
cd "$1" || exit 1
. ./script
failures=0
# offers LINE... WORD: completing LINE offers WORD.
offers() {
    wanted=${!#}
    COMP_WORDS=("${@:1:$#-1}")
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    COMPREPLY=()
    _ithaca 2>/dev/null
    for word in "${COMPREPLY[@]}"; do
        [ "$word" = "$wanted" ] && return
    done
    echo "${COMP_WORDS[*]}: offers '${COMPREPLY[*]}', not $wanted"
    failures=$((failures + 1))
}
offers ithaca tr train
offers ithaca '' completion
offers ithaca env --m --markdown
offers ithaca train run run.yaml
offers ithaca train run.yaml learn learning_rate=
offers ithaca train run.yaml optim_config.b optim_config.beta1=
offers ithaca train run.yaml peft_config.n peft_config.name=
offers ithaca completion f fish
offers ithaca help ex export
exit $((failures > 0))
END
bash "$dir/check" "$dir" && echo 'completion: ok'
