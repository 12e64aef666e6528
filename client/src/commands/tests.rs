use clap::{CommandFactory as _, FromArgMatches as _, Parser};
use muster_types::key::Secret;

use super::*;

#[derive(Debug, Parser)]
pub(super) struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    options: Options,
}

fn parse(line: &str) -> Result<Cli, clap::Error> {
    parse_words(line.split_whitespace().map(str::to_owned).collect())
}

/// Parses the words of a command line, without the environment of the test.
pub(super) fn parse_words(words: Vec<String>) -> Result<Cli, clap::Error> {
    let command = Cli::command().mut_args(|argument| argument.env(None::<&str>));
    Cli::from_arg_matches(&command.try_get_matches_from(words)?)
}

#[test]
fn command_definitions_are_consistent() {
    Cli::command().debug_assert();
}

#[test]
fn parses_every_command() {
    for line in [
        "muster login --namespace ci",
        "muster login --api-url http://host --namespace ci --key secret",
        "muster login --federated --rule deploy --namespace ci",
        "muster login --federated --rule deploy --audience cloud --print",
        "muster login --federated --rule deploy --token-file -",
        "muster login --federated --rule deploy --token-env MY_TOKEN --json",
        "muster logout",
        "muster whoami",
        "muster -o yaml -q whoami",
        "muster profile list",
        "muster profile add work --api-url http://host --namespace ci --key secret --use",
        "muster profile use work",
        "muster profile remove work",
        "muster --profile work instance list -w",
        "muster ssh web -l debian -i id -- uptime",
        "muster top --once --interval 1",
        "muster events --follow --type audit",
        "muster events instance web -f",
        "muster instance list --limit 3 --sort -memory --filter state:created --columns name,node -o wide",
        "muster network create lan 10.0.0.0/24 --dry-run",
        "muster namespace create ci --dry-run",
        "muster key add ci deploy --dry-run",
        "muster trust add ci other --dry-run",
        "muster claim create ci --cpus 1 --memory 1 --disk 1 --expires 1h --dry-run",
        "muster rule create ci deploy --issuer forge --claim ref=main --scope blob.read --ttl 60 --prefix ci --dry-run",
        "muster issuer create forge --issuer-url a --jwks-uri b --audience c --dry-run",
        "muster webhook create ci chat https://hooks.example/ --dry-run",
        "muster instance plug web lan --dry-run",
        "muster network delete lan --wait --timeout 5",
        "muster network delete lan --no-wait --wait",
        "muster artifact fetch debian:12 --timeout 60",
        "muster api GET /instances --query limit=10",
        "muster api post networks --data {\"name\":\"lan\",\"netblock\":\"10.0.0.0/24\"}",
        "muster apply -f cluster.yaml",
        "muster apply -f - --set shop --yes --prune --replace --timeout 60",
        "muster apply -f a -f b.yaml --dry-run --no-wait -o json",
        "muster cluster resources",
        "muster cluster locks",
        "muster cluster cacert",
        "muster key show ci deploy",
        "muster blob delete 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01",
        "muster namespace list --json",
        "muster namespace show ci",
        "muster namespace create ci",
        "muster namespace create ci --key-name deploy --key secret",
        "muster namespace delete ci",
        "muster namespace metadata ci",
        "muster namespace set-metadata ci size -7",
        "muster namespace delete-metadata ci size",
        "muster key list ci",
        "muster key add ci deploy --expires 30d",
        "muster key update ci deploy --key secret --expires 1767225600",
        "muster key delete ci deploy",
        "muster key metadata ci deploy",
        "muster key set-metadata ci deploy size -7",
        "muster key delete-metadata ci deploy size",
        "muster issuer metadata forge",
        "muster issuer set-metadata forge size -7",
        "muster issuer delete-metadata forge size",
        "muster rule metadata ci deploy",
        "muster rule set-metadata ci deploy size -7",
        "muster rule delete-metadata ci deploy size",
        "muster claim metadata ci 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01",
        "muster claim set-metadata ci 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01 size -7",
        "muster claim delete-metadata ci 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01 size",
        "muster agent metadata 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01",
        "muster agent set-metadata 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01 size -7",
        "muster agent delete-metadata 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01 size",
        "muster operation metadata net_op 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01",
        "muster operation set-metadata net_op 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01 size -7",
        "muster operation delete-metadata net_op 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01 size",
        "muster trust list ci",
        "muster trust add ci other",
        "muster trust remove ci other",
        "muster issuer list",
        "muster issuer show forge",
        "muster issuer create forge --issuer-url https://forge --jwks-uri https://forge/keys --audience cloud",
        "muster issuer update forge --audience other",
        "muster issuer delete forge",
        "muster issuer events forge",
        "muster rule list ci",
        "muster rule show ci deploy",
        "muster rule create ci deploy --issuer forge --claim sub=x --claim ref=main --scope artifact.* --ttl 600 --prefix robot",
        "muster rule update ci deploy --ttl 60 --scope blob.read --scope node.read",
        "muster rule delete ci deploy",
        "muster rule events ci deploy --limit 3 --type audit",
        "muster webhook list ci",
        "muster webhook show ci chat",
        "muster webhook create ci chat https://hooks.example --event-type status --object-type instance --message-prefix state --disabled",
        "muster webhook update ci chat --url https://other.example --object-type network --enable",
        "muster webhook delete ci chat",
        "muster webhook rotate-secret ci chat --overlap 0",
        "muster webhook deliveries ci chat",
        "muster webhook redeliver ci chat 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01",
        "muster webhook test ci chat",
        "muster claim list ci",
        "muster claim show ci 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01",
        "muster claim create ci --cpus 8 --memory 64G --disk 2T --expires 30d",
        "muster claim update ci 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01 --cpus 0 --expires 1767225600",
        "muster claim delete ci 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01",
        "muster claim events ci 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01 --limit 3",
        "muster quota show ci",
        "muster quota set ci networks=10 memory_mb=0",
        "muster quota reset ci networks floating_addresses",
        "muster cluster upgrade status",
        "muster cluster upgrade status --json",
        "muster cluster rebalance",
        "muster cluster rebalance --dry-run --max-moves 3",
        "muster cluster rebalance --yes --no-wait",
        "muster node list",
        "muster node show sim-1",
        "muster node resources sim-1",
        "muster node metrics sim-1",
        "muster node invite",
        "muster node invite --expires-in 60",
        "muster node join mjt_abc --config muster.conf",
        "muster node delete sim-1",
        "muster node delete sim-1 --yes",
        "muster node delete sim-1 --dead",
        "muster node delete sim-1 --dead --yes",
        "muster node evacuate sim-1 --dead --yes",
        "muster node drain sim-1",
        "muster node drain sim-1 --dry-run --stop",
        "muster node drain sim-1 --timeout 60",
        "muster node undrain sim-1",
        "muster node maintenance sim-1",
        "muster node adopt --data-dir /var/lib/muster",
        "muster node metadata sim-1",
        "muster node set-metadata sim-1 rack {\"row\":7}",
        "muster node delete-metadata sim-1 rack",
        "muster network list",
        "muster network list --all",
        "muster network show lan --json",
        "muster network why lan",
        "muster why web",
        "muster network create lan 10.0.0.0/24",
        "muster network create lan 10.0.0.0/24 --no-dhcp --no-nat --dns --in-namespace ci --no-wait",
        "muster network create lan 10.0.0.0/24 --timeout 5 --namespace system",
        "muster network delete lan",
        "muster network delete lan --no-wait",
        "muster network delete lan --timeout 5",
        "muster network delete-all --yes",
        "muster network delete-all --in-namespace ci --yes",
        "muster network interfaces lan",
        "muster network addresses lan",
        "muster network reserve lan 10.0.0.50",
        "muster network reserve lan 10.0.0.50 --comment printer",
        "muster network release lan 10.0.0.50",
        "muster network route lan",
        "muster network unroute lan 192.168.20.44",
        "muster network ping lan 10.0.0.17",
        "muster network set-name lan printer 10.0.0.50",
        "muster network delete-name lan printer",
        "muster network operations lan --all",
        "muster network metadata lan",
        "muster network set-metadata lan size -7",
        "muster network delete-metadata lan size",
        "muster instance list",
        "muster instance list --all",
        "muster instance show web",
        "muster instance create web --disk 8@tiny",
        "muster instance create web --cpus 2 --memory 2G --disk @debian:12 --disk 20,bus=nvme --network lan@10.0.0.7,float --network wan,model=e1000",
        "muster instance create web --disk 1 --ssh-key id.pub --user-data - --placed-on sim-1 --in-namespace ci --no-wait",
        "muster instance create web --disk 1 --uefi --secure-boot --nvram-template label:vars --no-config-drive --disposable --storage shared --replicas 1 --restart-elsewhere --fencing self --timeout 9",
        "muster instance create web --disk 1 --video model=qxl,vdi=vnc --metadata a=7 --tag web --affinity prefer-with=db --side-channel none",
        "muster instance why web",
        "muster instance delete web db",
        "muster instance delete web --no-wait",
        "muster instance delete-all",
        "muster instance delete-all --in-namespace ci --yes --timeout 9",
        "muster instance poweron web",
        "muster instance set-fencing web --fencing self --restart-elsewhere",
        "muster instance migrate web",
        "muster instance migrate web --to sim-2 --downtime-limit 50 --bandwidth-limit 1000 --auto-converge --timeout 9",
        "muster instance migrate web --stop",
        "muster instance cancel-migration web",
        "muster instance poweroff web",
        "muster instance pause web",
        "muster instance unpause web",
        "muster instance reboot web --hard",
        "muster instance interfaces web",
        "muster instance plug web lan@none",
        "muster instance plug web lan,float --timeout 5",
        "muster instance log web --lines 20 -f",
        "muster instance log web --bytes 20 --clear",
        "muster instance log web --all --raw",
        "muster instance screenshot web screen.png --force",
        "muster instance snapshot web",
        "muster instance snapshot web --all --thin --max-versions 3 --no-wait",
        "muster instance snapshot web --device vdc --timeout 9",
        "muster instance snapshots web",
        "muster instance vdi web",
        "muster instance vdi web --port 5900 --no-viewer",
        "muster instance vdi web --viewer virt-viewer",
        "muster instance vdi web --output web.vv",
        "muster instance vdi web --output -",
        "muster instance vdi web --url",
        "muster instance events web --limit 3 --type audit",
        "muster instance operations web --all",
        "muster instance metadata web",
        "muster instance set-metadata web size -7",
        "muster instance delete-metadata web size",
        "muster console web",
        "muster console web --linger 0",
        "muster exec web -- ls -l --json",
        "muster exec web --deadline 1.5 --wait 60 -- uptime",
        "muster exec web --detach --json -- uptime",
        "muster exec web -i -- cat",
        "muster exec web -t -- top",
        "muster cp file web:/tmp/file",
        "muster cp web:/tmp/file . --deadline 0 --progress-timeout 9",
        "muster cp - web:/tmp/file --mode 0755 --wait 9",
        "muster agent list web --all",
        "muster agent show 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01",
        "muster agent delete 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01",
        "muster agent events 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01 --limit 3",
        "muster instance facts web",
        "muster events instance web",
        "muster interface show 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01",
        "muster interface float 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01",
        "muster interface defloat 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01",
        "muster interface metadata 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01",
        "muster interface set-metadata 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01 size 7",
        "muster interface delete-metadata 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01 size",
        "muster artifact list",
        "muster artifact show debian",
        "muster artifact show debian --in-namespace ci --namespace system",
        "muster artifact fetch debian:12",
        "muster artifact fetch https://host/a.qcow2 --shared --in-namespace system --no-wait",
        "muster artifact upload tiny tiny.img",
        "muster artifact upload tiny - --type other --source-url x --shared --in-namespace ci --no-search",
        "muster artifact download tiny tiny.img",
        "muster artifact download tiny - --version 3 --force",
        "muster artifact versions tiny",
        "muster artifact delete tiny",
        "muster artifact delete-version tiny 3",
        "muster artifact delete-all --yes",
        "muster artifact delete-all --in-namespace ci --yes",
        "muster artifact max-versions tiny 5",
        "muster artifact share tiny",
        "muster artifact unshare tiny",
        "muster artifact events tiny --limit 3 --type audit",
        "muster artifact operations tiny --all",
        "muster artifact metadata tiny",
        "muster artifact set-metadata tiny size -7",
        "muster artifact delete-metadata tiny size",
        "muster blob list --node sim-1",
        "muster blob show 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01",
        "muster blob search sha512 abc",
        "muster blob checksum 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01",
        "muster blob checksum 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01 xxh128",
        "muster blob download 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01 file",
        "muster blob events 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01",
        "muster blob metadata 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01",
        "muster blob set-metadata 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01 size 7",
        "muster blob delete-metadata 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01 size",
        "muster label set tiny 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01",
        "muster label set ci/tiny debian --max-versions 2",
        "muster label show ci/tiny",
        "muster label delete tiny",
        "muster events artifact tiny",
        "muster events blob 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01",
        "muster events network lan --limit 10",
        "muster events namespace ci --limit 10 --type audit",
        "muster events node sim-1",
        "muster operation show namespace_op 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01",
        "muster operation why namespace_op 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01",
        "muster operation chain 5d5e1b5a-8a3c-4b0e-9d0c-6f1c1f6f0a01",
        "muster operation list --target-type namespace --target ci",
    ] {
        parse(line).unwrap_or_else(|error| panic!("{line}: {error}"));
    }
}

#[test]
fn global_key_and_command_key_are_distinct() {
    let cli = parse("muster --key mine key add ci deploy --key new --namespace system").unwrap();
    assert_eq!(cli.options.namespace.as_deref(), Some("system"));
    assert_eq!(cli.options.key, Some(Secret::new("mine")));
    let Command::Key(key::Command::Add { namespace, key, .. }) = cli.command else { panic!("not a key") };
    assert_eq!((namespace.as_str(), key), ("ci", Some(Secret::new("new"))));

    let cli = parse("muster key add ci deploy --key new").unwrap();
    assert_eq!(cli.options.key, None);
}

#[test]
fn login_requires_a_key_or_a_token_and_a_rule() {
    for line in [
        "muster login --federated",
        "muster login --rule deploy",
        "muster login --print",
        "muster login --token-file token",
        "muster login --audience cloud",
        "muster login --federated --rule deploy --key secret",
        "muster login --federated --rule deploy --token-file token --token-env TOKEN",
        "muster login --federated --rule deploy --token-file token --audience cloud",
    ] {
        assert!(parse(line).is_err(), "{line}");
    }
}

#[test]
fn first_key_requires_name_and_secret() {
    assert!(parse("muster namespace create ci --key-name deploy").is_err());
    assert!(parse("muster namespace create ci --key secret").is_err());
}

#[test]
fn rejects_unknown_types_and_invalid_expiries() {
    assert!(parse("muster events node sim-1 --type gossip").is_err());
    assert!(parse("muster key add ci deploy --expires soon").is_err());
    assert!(
        parse("muster claim create ci --cpus 8 --memory 64G --disk 2T").is_err(),
        "an expiry is required"
    );
    assert!(parse("muster claim update ci x").is_err(), "nothing to change");
}

#[test]
fn global_namespace_and_target_namespace_are_distinct() {
    let cli = parse("muster network create lan 10.0.0.0/24 --in-namespace ci --namespace system").unwrap();
    assert_eq!(cli.options.namespace.as_deref(), Some("system"));
    let Command::Network(network::Command::Create { in_namespace, .. }) = cli.command else {
        panic!("not a network")
    };
    assert_eq!(in_namespace.as_deref(), Some("ci"));
}

#[test]
fn deleting_everything_requires_confirmation() {
    assert!(parse("muster network delete-all").is_err());
    assert!(parse("muster network delete-all --in-namespace ci").is_err());
    assert!(parse("muster artifact delete-all --in-namespace ci").is_err());
}

#[test]
fn rejects_invalid_instance_arguments() {
    for line in [
        "muster instance create web",
        "muster instance create web --disk tiny",
        "muster instance create web --disk 1 --secure-boot",
        "muster instance create web --disk 1 --memory lots",
        "muster instance create web --disk 1 --network lan,fast",
        "muster instance create web --disk 1 --video vdi=rdp",
        "muster instance delete",
        "muster instance snapshot web --all --device vda",
        "muster instance log web --lines 3 --bytes 3",
        "muster instance log web --follow --clear",
        "muster instance vdi web --url --output web.vv",
        "muster instance vdi web --url --no-viewer",
        "muster instance vdi web --output web.vv --port 5900",
        "muster instance vdi web --port 70000",
    ] {
        assert!(parse(line).is_err(), "{line}");
    }
}

#[test]
fn rejects_invalid_agent_arguments() {
    for line in [
        "muster exec web",
        "muster exec web uptime",
        "muster exec web --deadline -1 -- uptime",
        "muster cp file web:file",
        "muster cp file web:/",
        "muster cp file web:/file --mode 999",
    ] {
        assert!(parse(line).is_err(), "{line}");
    }
}

#[test]
fn rejects_webhook_updates_without_or_with_contradictory_changes() {
    for line in ["muster webhook update ci chat", "muster webhook update ci chat --enable --disable"] {
        assert!(parse(line).is_err(), "{line}");
    }
}

#[test]
fn rejects_rules_without_claims_or_scopes() {
    for line in [
        "muster issuer update forge",
        "muster rule update ci deploy",
        "muster rule create ci deploy --issuer forge --scope node.read --ttl 60 --prefix robot",
        "muster rule create ci deploy --issuer forge --claim sub=x --ttl 60 --prefix robot",
        "muster rule create ci deploy --issuer forge --claim sub --scope node.read --ttl 60 --prefix robot",
    ] {
        assert!(parse(line).is_err(), "{line}");
    }
}

#[test]
fn rejects_other_upload_types_and_algorithms() {
    assert!(parse("muster artifact upload tiny tiny.img --type label").is_err());
    assert!(parse("muster blob search md5 abc").is_err());
}

#[test]
fn timeout_conflicts_with_no_wait() {
    assert!(parse("muster network delete lan --no-wait --timeout 5").is_err());
}

#[test]
fn debug_output_contains_no_secret() {
    let cli = parse("muster --key hunter2 key update ci deploy --key hunter2").unwrap();
    assert!(!format!("{cli:?}").contains("hunter2"));
}
