use super::*;

#[test]
fn computes_the_addresses_of_a_netblock() {
    let block = Netblock::check("10.1.2.0/29").unwrap();
    assert_eq!(block.size(), 8);
    assert_eq!(block.router().to_string(), "10.1.2.1");
    assert_eq!(block.broadcast().to_string(), "10.1.2.7");
    assert_eq!(block.netmask().to_string(), "255.255.255.248");
    assert!(block.contains("10.1.2.7".parse().unwrap()) && !block.contains("10.1.2.8".parse().unwrap()));
    assert_eq!(Netblock::check("10.0.0.0/8").unwrap().size(), 1 << 24);
}

#[test]
fn rejects_unusable_netblocks_with_the_reason() {
    for (text, why) in [
        ("10.0.0.1/24", "host bits set"),
        ("10.0.0.0/30", "below minimum size of /29"),
        ("10.0.0.1", "below minimum size of /29"),
        ("0.0.0.0/0", "above maximum size"),
        ("2001:db8::/64", "not an IPv4 network"),
        ("10.0.0/24", "not of the form"),
        ("10.0.0.0/+24", "prefix length"),
        ("10.0.0.0/024", "prefix length"),
        ("10.0.0.0/33", "prefix length"),
        ("", "not of the form"),
        ("127.0.0.0/24", "loopback"),
        ("224.1.0.0/16", "multicast"),
        ("255.0.0.0/8", "multicast"),
        ("169.254.7.0/24", "link-local"),
        ("0.1.0.0/16", "this host"),
    ] {
        let refusal = Netblock::check(text).unwrap_err().to_string();
        assert!(refusal.contains(why) && refusal.contains("netblock"), "{text}: {refusal}");
    }
}

#[test]
fn blocks_overlap_when_one_contains_the_other() {
    let block = |text: &str| text.parse::<Netblock>().unwrap();
    assert!(block("10.0.0.0/8").overlaps(block("10.9.0.0/16")));
    assert!(block("10.9.0.0/16").overlaps(block("10.0.0.0/8")));
    assert!(!block("10.0.0.0/24").overlaps(block("10.0.1.0/24")));
}

#[test]
fn mac_addresses_have_a_canonical_form() {
    let mac: MacAddress = "02:00:00:AB:cd:0f".parse().unwrap();
    assert_eq!(mac.to_string(), "02:00:00:ab:cd:0f");
    for text in [
        "",
        "02:00:00:ab:cd",
        "02:00:00:ab:cd:0f:11",
        "2:0:0:a:b:c",
        "02-00-00-ab-cd-0f",
        "02:00:00:ab:cd:0g",
    ] {
        assert!(text.parse::<MacAddress>().is_err(), "{text}");
    }
    assert_ne!(MacAddress::random(), MacAddress::random());
}
