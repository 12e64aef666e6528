//! The examples of the help texts. Tests parse each of them, and check that every command has one.

use clap::Command;

/// Commands and examples of their use, as people type them.
const EXAMPLES: &[(&str, &[&str])] = &[
    ("agent delete", &["muster agent delete 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01"]),
    ("agent delete-metadata", &["muster agent delete-metadata 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01 owner"]),
    ("agent events", &["muster agent events 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01 --limit 3"]),
    ("agent list", &["muster agent list web", "muster agent list web --all"]),
    ("agent metadata", &["muster agent metadata 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01"]),
    ("agent set-metadata", &["muster agent set-metadata 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01 owner ops"]),
    ("agent show", &["muster agent show 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01"]),
    (
        "api",
        &[
            "muster api GET /instances --query limit=10",
            "muster api POST /networks --data '{\"name\": \"lan\", \"netblock\": \"10.0.0.0/24\"}'",
            "muster api PUT /networks/lan/metadata/owner --data @owner.json",
        ],
    ),
    (
        "apply",
        &[
            "muster apply -f cluster.yaml",
            "muster apply -f cluster.yaml --dry-run",
            "muster apply -f networks -f web.yaml --set shop --prune --yes",
        ],
    ),
    ("artifact delete", &["muster artifact delete tiny"]),
    ("artifact delete-all", &["muster artifact delete-all --yes"]),
    ("artifact delete-metadata", &["muster artifact delete-metadata tiny owner"]),
    ("artifact delete-version", &["muster artifact delete-version tiny 3"]),
    (
        "artifact download",
        &["muster artifact download tiny tiny.img", "muster artifact download tiny tiny.img --version 3"],
    ),
    ("artifact events", &["muster artifact events tiny --limit 3"]),
    (
        "artifact fetch",
        &[
            "muster artifact fetch debian:12",
            "muster artifact fetch https://images.example/a.qcow2 --shared --timeout 600",
        ],
    ),
    (
        "artifact list",
        &["muster artifact list", "muster artifact list --filter shared:true --columns name,size,source"],
    ),
    ("artifact max-versions", &["muster artifact max-versions tiny 5"]),
    ("artifact metadata", &["muster artifact metadata tiny"]),
    ("artifact operations", &["muster artifact operations tiny --all"]),
    ("artifact set-metadata", &["muster artifact set-metadata tiny owner ops"]),
    ("artifact share", &["muster artifact share tiny"]),
    ("artifact show", &["muster artifact show debian"]),
    ("artifact unshare", &["muster artifact unshare tiny"]),
    (
        "artifact upload",
        &["muster artifact upload tiny tiny.img", "muster artifact upload notes notes.txt --type other"],
    ),
    ("artifact versions", &["muster artifact versions tiny"]),
    ("blob checksum", &["muster blob checksum 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01"]),
    ("blob delete", &["muster blob delete 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01"]),
    ("blob delete-metadata", &["muster blob delete-metadata 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01 owner"]),
    ("blob download", &["muster blob download 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01 file"]),
    ("blob events", &["muster blob events 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01"]),
    ("blob list", &["muster blob list --node sim-1"]),
    ("blob metadata", &["muster blob metadata 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01"]),
    ("blob search", &["muster blob search sha512 abc"]),
    ("blob set-metadata", &["muster blob set-metadata 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01 owner ops"]),
    ("blob show", &["muster blob show 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01"]),
    ("claim create", &["muster claim create ci --cpus 8 --memory 64G --disk 2T --expires 30d"]),
    ("claim delete", &["muster claim delete ci 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01"]),
    (
        "claim delete-metadata",
        &["muster claim delete-metadata ci 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01 owner"],
    ),
    ("claim events", &["muster claim events ci 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01 --limit 3"]),
    ("claim list", &["muster claim list ci"]),
    ("claim metadata", &["muster claim metadata ci 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01"]),
    ("claim set-metadata", &["muster claim set-metadata ci 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01 owner ops"]),
    ("claim show", &["muster claim show ci 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01"]),
    ("claim update", &["muster claim update ci 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01 --cpus 16"]),
    ("cluster cacert", &["muster cluster cacert"]),
    ("cluster locks", &["muster cluster locks"]),
    (
        "cluster rebalance",
        &["muster cluster rebalance --dry-run", "muster cluster rebalance --max-moves 3 --yes"],
    ),
    ("cluster resources", &["muster cluster resources"]),
    ("cluster upgrade status", &["muster cluster upgrade status"]),
    (
        "backup create",
        &[
            "muster backup create /srv/backups/monday.backup --recipient backup-recipient-…",
            "muster backup create /srv/backups/all.backup --blobs include --passphrase-file /media/usb/passphrase",
        ],
    ),
    ("backup create-key", &["muster backup create-key /media/usb/backup.key"]),
    (
        "backup drill",
        &["muster backup drill /srv/backups/all.backup --key-file /media/usb/backup.key --instance web"],
    ),
    ("backup verify", &["muster backup verify /srv/backups/all.backup --key-file /media/usb/backup.key"]),
    (
        "completion",
        &[
            "source <(muster completion bash)",
            "muster completion zsh > ~/.zfunc/_muster",
            "muster completion fish > ~/.config/fish/completions/muster.fish",
        ],
    ),
    ("config", &["muster config", "muster config --json"]),
    ("console", &["muster console web"]),
    ("cp", &["muster cp notes.txt web:/root/notes.txt", "muster cp web:/var/log/messages . --wait 60"]),
    (
        "db copy",
        &["muster db copy --from sqlite:/var/lib/muster/muster.db --to mysql://user:password@host/name"],
    ),
    ("db recover-key", &["muster db recover-key --data-dir /var/lib/muster"]),
    ("docs", &["muster docs --output /srv/www/muster"]),
    ("doctor", &["muster doctor", "muster doctor --data-dir /srv/muster -o json"]),
    ("down", &["muster down", "muster down --guests"]),
    ("events", &["muster events --follow", "muster events instance web --limit 20"]),
    ("events artifact", &["muster events artifact tiny"]),
    ("events blob", &["muster events blob 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01"]),
    (
        "events instance",
        &[
            "muster events instance web --limit 20",
            "muster events instance web",
            "muster events instance web --follow",
        ],
    ),
    ("events namespace", &["muster events namespace ci --limit 10 --type audit"]),
    ("events network", &["muster events network lan --limit 10"]),
    ("events node", &["muster events node sim-1 --type resources"]),
    (
        "exec",
        &[
            "muster exec web -- uname -a",
            "muster exec web -- 'ls /etc | wc -l'",
            "muster exec web -it --wait 60 -- sh",
        ],
    ),
    ("forward", &["muster forward 8022 192.168.20.5:22", "muster forward 0.0.0.0:8080 192.168.20.5:80"]),
    ("instance cancel-migration", &["muster instance cancel-migration web"]),
    (
        "instance create",
        &[
            "muster instance create web --cpus 2 --memory 2G --disk 8@tiny --network lan",
            "muster instance create web --disk @debian:12 --disk 20 --network lan@10.0.0.7,float --ssh-key id.pub",
            "muster instance create big --cpus 16 --memory 64G --disk 100 --dry-run",
        ],
    ),
    ("instance delete", &["muster instance delete web db"]),
    (
        "instance delete-all",
        &["muster instance delete-all", "muster instance delete-all --in-namespace ci --yes"],
    ),
    ("instance delete-metadata", &["muster instance delete-metadata web owner"]),
    ("instance events", &["muster instance events web --limit 20", "muster instance events web --follow"]),
    ("instance facts", &["muster instance facts web"]),
    ("instance interfaces", &["muster instance interfaces web"]),
    (
        "instance list",
        &[
            "muster instance list",
            "muster instance list --filter node:sim-1 --sort=-memory --limit 10",
            "muster instance list --watch -o wide",
        ],
    ),
    ("instance log", &["muster instance log web --lines 20 --follow"]),
    ("instance metadata", &["muster instance metadata web"]),
    (
        "instance migrate",
        &["muster instance migrate web", "muster instance migrate web --to sim-2 --timeout 600"],
    ),
    ("instance operations", &["muster instance operations web", "muster instance operations web --all"]),
    ("instance pause", &["muster instance pause web"]),
    ("instance plug", &["muster instance plug web lan,float"]),
    ("instance poweroff", &["muster instance poweroff web"]),
    ("instance poweron", &["muster instance poweron web"]),
    ("instance reboot", &["muster instance reboot web", "muster instance reboot web --hard"]),
    ("instance screenshot", &["muster instance screenshot web screen.png"]),
    ("instance set-fencing", &["muster instance set-fencing web --fencing self --restart-elsewhere"]),
    ("instance set-metadata", &["muster instance set-metadata web owner ops"]),
    ("instance show", &["muster instance show web"]),
    (
        "instance snapshot",
        &["muster instance snapshot web", "muster instance snapshot web --all --max-versions 3"],
    ),
    ("instance snapshots", &["muster instance snapshots web"]),
    ("instance unpause", &["muster instance unpause web"]),
    ("instance vdi", &["muster instance vdi web", "muster instance vdi web --no-viewer --port 5900"]),
    ("instance why", &["muster instance why web"]),
    ("interface defloat", &["muster interface defloat 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01"]),
    (
        "interface delete-metadata",
        &["muster interface delete-metadata 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01 owner"],
    ),
    ("interface float", &["muster interface float 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01"]),
    ("interface metadata", &["muster interface metadata 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01"]),
    (
        "interface set-metadata",
        &["muster interface set-metadata 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01 owner ops"],
    ),
    ("interface show", &["muster interface show 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01"]),
    (
        "issuer create",
        &[
            "muster issuer create forge --issuer-url https://forge --jwks-uri https://forge/keys --audience cloud",
        ],
    ),
    ("issuer delete", &["muster issuer delete forge"]),
    ("issuer delete-metadata", &["muster issuer delete-metadata forge owner"]),
    ("issuer events", &["muster issuer events forge"]),
    ("issuer list", &["muster issuer list"]),
    ("issuer metadata", &["muster issuer metadata forge"]),
    ("issuer set-metadata", &["muster issuer set-metadata forge owner ops"]),
    ("issuer show", &["muster issuer show forge"]),
    ("issuer update", &["muster issuer update forge --audience other"]),
    ("key add", &["muster key add ci deploy --expires 30d"]),
    ("key delete", &["muster key delete ci deploy"]),
    ("key delete-metadata", &["muster key delete-metadata ci deploy owner"]),
    ("key list", &["muster key list ci", "muster key list ci --filter name:robot*"]),
    ("key metadata", &["muster key metadata ci deploy"]),
    ("key set-metadata", &["muster key set-metadata ci deploy owner ops"]),
    ("key show", &["muster key show ci deploy"]),
    ("key update", &["muster key update ci deploy --expires 30d"]),
    ("label delete", &["muster label delete tiny"]),
    ("label set", &["muster label set tiny 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01"]),
    ("label show", &["muster label show ci/tiny"]),
    (
        "login",
        &[
            "muster --api-url https://cloud.example:13000 --namespace ci login",
            "muster --namespace ci login --federated --rule deploy",
        ],
    ),
    ("logout", &["muster logout"]),
    (
        "namespace create",
        &["muster namespace create ci", "muster namespace create ci --key-name deploy --key -"],
    ),
    ("namespace delete", &["muster namespace delete ci --timeout 300"]),
    ("namespace delete-metadata", &["muster namespace delete-metadata ci owner"]),
    ("namespace list", &["muster namespace list", "muster namespace list -o name"]),
    ("namespace metadata", &["muster namespace metadata ci"]),
    ("namespace set-metadata", &["muster namespace set-metadata ci owner ops"]),
    ("namespace show", &["muster namespace show ci"]),
    ("network addresses", &["muster network addresses lan"]),
    (
        "network create",
        &["muster network create lan 10.0.0.0/24 --dns", "muster network create lan 10.0.0.0/24 --dry-run"],
    ),
    ("network delete", &["muster network delete lan", "muster network delete lan --no-wait"]),
    ("network delete-all", &["muster network delete-all --yes"]),
    ("network delete-metadata", &["muster network delete-metadata lan owner"]),
    ("network delete-name", &["muster network delete-name lan printer"]),
    ("network interfaces", &["muster network interfaces lan"]),
    (
        "network list",
        &["muster network list", "muster network list --filter state:created --sort name -o yaml"],
    ),
    ("network metadata", &["muster network metadata lan"]),
    ("network operations", &["muster network operations lan --all"]),
    ("network ping", &["muster network ping lan 10.0.0.17"]),
    ("network release", &["muster network release lan 10.0.0.50"]),
    ("network reserve", &["muster network reserve lan 10.0.0.50 --comment printer"]),
    ("network route", &["muster network route lan"]),
    ("network set-metadata", &["muster network set-metadata lan owner ops"]),
    ("network set-name", &["muster network set-name lan printer 10.0.0.50"]),
    ("network show", &["muster network show lan"]),
    ("network unroute", &["muster network unroute lan 192.168.20.44"]),
    ("network why", &["muster network why lan"]),
    ("node adopt", &["muster node adopt", "muster node adopt --data-dir /srv/muster --moved"]),
    ("node delete", &["muster node delete sim-1", "muster node delete sim-1 --dead"]),
    ("node delete-metadata", &["muster node delete-metadata sim-1 rack"]),
    ("node drain", &["muster node drain sim-1", "muster node drain sim-1 --dry-run"]),
    ("node evacuate", &["muster node evacuate sim-1 --dead"]),
    ("node invite", &["muster node invite"]),
    ("node join", &["muster node join mjt_abc"]),
    (
        "node list",
        &["muster node list", "muster node list --watch", "muster node list --columns name,state,release"],
    ),
    ("node maintenance", &["muster node maintenance sim-1"]),
    ("node metadata", &["muster node metadata sim-1"]),
    ("node metrics", &["muster node metrics sim-1"]),
    ("node resources", &["muster node resources sim-1"]),
    ("node set-metadata", &["muster node set-metadata sim-1 rack '{\"row\": 7}'"]),
    ("node show", &["muster node show sim-1"]),
    ("node undrain", &["muster node undrain sim-1"]),
    ("operation chain", &["muster operation chain 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01"]),
    (
        "operation delete-metadata",
        &["muster operation delete-metadata net_op 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01 owner"],
    ),
    ("operation list", &["muster operation list --target-type namespace --target ci"]),
    ("operation metadata", &["muster operation metadata net_op 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01"]),
    (
        "operation set-metadata",
        &["muster operation set-metadata net_op 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01 owner ops"],
    ),
    ("operation show", &["muster operation show namespace_op 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01"]),
    ("operation why", &["muster operation why namespace_op 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01"]),
    ("profile add", &["muster --api-url https://cloud.example:13000 --namespace ci profile add work --use"]),
    ("profile list", &["muster profile list"]),
    ("profile remove", &["muster profile remove work"]),
    ("profile use", &["muster profile use work", "muster profile use default"]),
    ("quota reset", &["muster quota reset ci networks floating_addresses"]),
    ("quota set", &["muster quota set ci networks=10 memory_mb=65536"]),
    ("quota show", &["muster quota show ci"]),
    ("restore", &["muster restore all.backup --key-file /media/usb/backup.key --data-dir /var/lib/muster"]),
    (
        "rule create",
        &[
            "muster rule create ci deploy --issuer forge --claim sub=x --scope artifact.* --ttl 600 --prefix robot",
        ],
    ),
    ("rule delete", &["muster rule delete ci deploy"]),
    ("rule delete-metadata", &["muster rule delete-metadata ci deploy owner"]),
    ("rule events", &["muster rule events ci deploy --limit 3"]),
    ("rule list", &["muster rule list ci"]),
    ("rule metadata", &["muster rule metadata ci deploy"]),
    ("rule set-metadata", &["muster rule set-metadata ci deploy owner ops"]),
    ("rule show", &["muster rule show ci deploy"]),
    ("rule update", &["muster rule update ci deploy --ttl 60 --scope blob.read --scope node.read"]),
    ("serve", &["muster serve", "muster serve --simulate 3 --data-dir /tmp/muster --listen 127.0.0.1:14000"]),
    ("ssh", &["muster ssh web", "muster ssh web --login debian -- uptime"]),
    ("top", &["muster top", "muster top --once --limit 5"]),
    ("trust add", &["muster trust add ci other"]),
    ("trust list", &["muster trust list ci"]),
    ("trust remove", &["muster trust remove ci other"]),
    ("ui", &["muster ui"]),
    (
        "up",
        &["muster up --background", "muster up --demo", "muster up --simulate 3 --data-dir /tmp/simulated"],
    ),
    (
        "webhook create",
        &["muster webhook create ci chat https://hooks.example --event-type status --object-type instance"],
    ),
    ("webhook delete", &["muster webhook delete ci chat"]),
    ("webhook deliveries", &["muster webhook deliveries ci chat"]),
    ("webhook list", &["muster webhook list ci"]),
    ("webhook redeliver", &["muster webhook redeliver ci chat 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01"]),
    (
        "webhook rotate-secret",
        &["muster webhook rotate-secret ci chat", "muster webhook rotate-secret ci chat --overlap 0"],
    ),
    ("webhook show", &["muster webhook show ci chat"]),
    ("webhook test", &["muster webhook test ci chat"]),
    ("webhook update", &["muster webhook update ci chat --url https://other.example"]),
    ("whoami", &["muster whoami"]),
    ("why", &["muster why web"]),
];
/// The examples of the program itself.
const FIRST_STEPS: [&str; 4] = [
    "muster network create lan 10.0.0.0/24",
    "muster instance create web --disk 8@tiny --network lan",
    "muster console web",
    "muster why web",
];
/// The number of examples of a noun.
const MAX_EXAMPLES_OF_NOUN: usize = 4;

/// Adds examples to the help of each command.
#[must_use]
pub fn with_examples(root: Command) -> Command {
    let root = root.mut_subcommands(|command| {
        let path = command.get_name().to_owned();
        add_examples(command, &path)
    });
    add_lines(root, FIRST_STEPS.into_iter())
}

fn add_examples(command: Command, path: &str) -> Command {
    let command = command.mut_subcommands(|inner| {
        let path = format!("{path} {}", inner.get_name());
        add_examples(inner, &path)
    });
    match EXAMPLES.iter().find(|(name, _)| *name == path) {
        Some((_, lines)) => add_lines(command, lines.iter().copied()),
        None => {
            let verbs = EXAMPLES.iter().filter(|(name, _)| {
                name.strip_prefix(path).is_some_and(|rest| rest.starts_with(' '))
                    && !name.ends_with("metadata")
            });
            add_lines(
                command,
                verbs.filter_map(|(_, lines)| lines.first().copied()).take(MAX_EXAMPLES_OF_NOUN),
            )
        }
    }
}

/// Adds lines to the end of the help of a command.
fn add_lines(command: Command, lines: impl Iterator<Item = &'static str>) -> Command {
    let lines: String = lines.map(|line| format!("\n  {line}")).collect();
    if lines.is_empty() {
        return command;
    }
    let before = command
        .get_after_help()
        .map_or_else(String::new, |text| format!("{}\n\n", text.to_string().trim_end()));
    command.after_help(format!("{before}Examples:{lines}"))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::super::tests::{Cli, parse_words};
    use super::*;

    /// The commands of the executable, which are not defined in this crate.
    const OTHER_COMMANDS: [&str; 15] = [
        "backup create",
        "backup create-key",
        "backup drill",
        "backup verify",
        "completion",
        "config",
        "db copy",
        "db recover-key",
        "docs",
        "doctor",
        "down",
        "forward",
        "restore",
        "serve",
        "up",
    ];

    /// Splits a command line as a shell does, with single quotes only.
    fn split(line: &str) -> Vec<String> {
        let (mut words, mut word, mut is_quoted) = (vec![], String::new(), false);
        for character in line.chars() {
            match character {
                '\'' => is_quoted = !is_quoted,
                ' ' if !is_quoted => words.push(std::mem::take(&mut word)),
                other => word.push(other),
            }
        }
        words.push(word);
        words
    }

    #[test]
    fn every_example_is_a_valid_command_line() {
        for (command, lines) in EXAMPLES.iter().filter(|(command, _)| !OTHER_COMMANDS.contains(command)) {
            for line in *lines {
                parse_words(split(line)).unwrap_or_else(|error| panic!("{line}: {error}"));
                assert!(line.contains(command), "{line:?} is not an example of {command:?}");
            }
        }
        for line in FIRST_STEPS {
            parse_words(split(line)).unwrap();
        }
    }

    #[test]
    fn help_of_every_command_has_an_example() {
        fn check(command: &Command, path: &str) {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(help.contains("Examples:\n  muster "), "`{path}` has no example");
            for inner in command.get_subcommands().filter(|inner| inner.get_name() != "help") {
                check(inner, &format!("{path} {}", inner.get_name()));
            }
        }
        check(&with_examples(Cli::command()), "muster");
    }
}
