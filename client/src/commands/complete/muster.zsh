#compdef muster
# Completion of muster for zsh: source <(muster completion zsh)
_muster() {
    local line word
    local -a candidates
    local files=
    for line in "${(@f)$("${words[1]}" __complete -- "${(@)words[2,CURRENT]}" 2>/dev/null)}"; do
        word=${line%%$'\t'*}
        if [[ $word == :files ]]; then
            files=1
        elif [[ -n $word ]]; then
            candidates+=("${word//:/\\:}:${line#*$'\t'}")
        fi
    done
    (( $#candidates )) && _describe muster candidates
    if [[ -n $files ]]; then
        # The value of --option=FILE.
        [[ ${words[CURRENT]} == --*=* ]] && compset -P '*='
        _files
    fi
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _muster "$@"
else
    compdef _muster muster
fi
