# Completion of muster for fish: muster completion fish | source
function __muster_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    # The value of --option=FILE.
    set -l option (string match -r -- '^--[^=]*=' "$current")
    for line in ($words[1] __complete -- $words[2..-1] "$current" 2>/dev/null)
        if test "$line" = :files
            for file in (__fish_complete_path (string replace -r -- '^--[^=]*=' '' "$current"))
                echo "$option$file"
            end
        else
            echo $line
        end
    end
end
complete -c muster -f -a '(__muster_complete)'
