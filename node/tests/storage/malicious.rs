//! Malicious images: each is refused with its reason, and none reveals a file of the host.

use std::fs;
use std::path::Path;

use muster_types::Error;
use muster_types::blob::{ImageFacts, ImageFormat};
use muster_types::ids::BlobId;

use crate::fixture::{MIB, TestNode, sh};
use crate::images::{compressed, guest_disk};

const SECRET: &str = "the-secret-of-the-host-5f1c";

/// A secret file of the host, and the directory in which images are created.
struct ImageFactory {
    directory: tempfile::TempDir,
}

impl ImageFactory {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("secret"), SECRET.repeat(1000)).unwrap();
        fs::write(directory.path().join("disk"), guest_disk()).unwrap();
        Self { directory }
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Runs a script that creates the file `made`, and returns its content.
    fn create(&self, script: &str) -> Vec<u8> {
        sh(&format!("cd {}; rm -f made; {script}", self.path().display()));
        fs::read(self.path().join("made")).unwrap()
    }

    /// Returns a valid image with some bytes overwritten.
    fn changed(&self, changes: &[(usize, &[u8])]) -> Vec<u8> {
        let mut image = self.create("qemu-img create -q -f qcow2 made 64M");
        for (at, value) in changes {
            image[*at..at + value.len()].copy_from_slice(value);
        }
        image
    }

    /// Returns an image with a handcrafted backing file name.
    fn backed_by(&self, name: &str) -> Vec<u8> {
        let (at, length) = (0x200u64.to_be_bytes(), u32::try_from(name.len()).unwrap().to_be_bytes());
        self.changed(&[(8, &at), (16, &length), (0x200, name.as_bytes())])
    }
}

async fn assert_refused(node: &TestNode, name: &str, image: &[u8], reason: &str) {
    let (draft, blob) = (node.draft(image).await, BlobId::new());
    node.storage().commit(draft, blob).await.unwrap();
    let refusal = match node.storage().inspect("ci", blob).await {
        Err(Error::Invalid(text)) => text,
        other => panic!("{name}: {other:?}"),
    };
    assert!(refusal.contains(reason), "{name}: {refusal}");
    assert!(!refusal.contains('/') && !refusal.contains(SECRET), "{name}: {refusal}");
    // It is not converted either, whatever the recorded facts are.
    for format in [ImageFormat::Qcow2, ImageFormat::Raw] {
        let facts = ImageFacts {
            format,
            compression: None,
            virtual_size: 64 << 20,
            format_details: serde_json::Map::new(),
        };
        let result = node.storage().convert("ci", blob, &facts).await;
        let inner = name.starts_with("inside");
        assert!(inner || matches!(result, Err(Error::Invalid(_))), "{name}: {result:?}");
    }
    let leaks = sh(&format!("grep -rlF {SECRET} {} || true", node.directory.display()));
    assert_eq!(leaks, "", "{name}");
    node.storage().remove(blob).await.unwrap();
    node.storage().remove_draft(draft).await.unwrap();
    assert_eq!(node.files(), [] as [std::path::PathBuf; 0], "{name}");
}

/// Retries a command: creating a key measures CPU time, which fails occasionally.
fn retrying(command: &str) -> String {
    format!("for _ in 1 2 3 4 5 6 7 8 9; do {command} && break; rm -f made; done; test -s made")
}

#[tokio::test(flavor = "multi_thread")]
async fn refuses_images_that_refer_to_other_files() {
    let Some(node) = TestNode::real(&[]).await else { return };
    let factory = ImageFactory::new();
    let secret = factory.path().join("secret").display().to_string();
    let json = format!(r#"json:{{"driver":"raw","file":{{"driver":"file","filename":"{secret}"}}}}"#);
    let backing = "backing file, which could be any file of the host";
    for (name, image) in [
        ("made", factory.create(&format!("qemu-img create -q -f qcow2 -b {secret} -F raw made"))),
        ("by hand", factory.backed_by(&secret)),
        ("json", factory.backed_by(&json)),
        ("network", factory.backed_by("nbd://127.0.0.1/x")),
        ("chain", factory.create("qemu-img create -q -f qcow2 a 1M; qemu-img create -q -f qcow2 -b a -F qcow2 b; qemu-img create -q -f qcow2 -b b -F qcow2 made")),
        ("itself", factory.backed_by("/in")),
        ("old", factory.create(&format!("qemu-img create -q -f qcow2 -o compat=0.10 -b {secret} -F raw made"))),
    ] {
        assert_refused(&node, name, &image, backing).await;
        assert_refused(&node, &format!("{name}, packed"), &compressed("gzip", &image), backing).await;
    }
    let external = factory.create("qemu-img create -q -f qcow2 -o data_file=data made 1M");
    assert_refused(&node, "external", &external, "data in another file").await;
    let raw = factory.create("qemu-img create -q -f qcow2 -o data_file=data,data_file_raw=on made 1M");
    assert_refused(&node, "external, raw", &raw, "data in another file").await;
    let mut hidden = external;
    hidden[79] = 0;
    assert_refused(&node, "external without its mark", &hidden, "names another file").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn refuses_invalid_headers() {
    let Some(node) = TestNode::real(&[]).await else { return };
    let factory = ImageFactory::new();
    let whole = factory.changed(&[]);
    let huge = u32::MAX.to_be_bytes();
    let far = (1u64 << 40).to_be_bytes();
    let secret = retrying(
        "qemu-img create -q -f qcow2 --object secret,id=s,data=abc123 -o encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10 made 1M",
    );
    for (name, image, reason) in [
        ("huge table", factory.changed(&[(36, &huge)]), "larger than any disk"),
        ("table beyond the end", factory.changed(&[(40, &far)]), "beyond the end"),
        ("references beyond the end", factory.changed(&[(48, &far)]), "beyond the end"),
        ("corrupt", factory.changed(&[(72, &2u64.to_be_bytes())]), "corrupt"),
        ("unknown feature", factory.changed(&[(72, &(1u64 << 63).to_be_bytes())]), "unknown qcow2 features"),
        ("encrypted", factory.create(&secret), "encrypted"),
        ("encrypted the old way", factory.changed(&[(32, &1u32.to_be_bytes())]), "encrypted"),
        ("16 EiB", factory.changed(&[(24, &u64::MAX.to_be_bytes())]), "too small for its disk"),
        ("no size", factory.changed(&[(24, &[0; 8])]), "size 0"),
        ("8 TiB", factory.create("qemu-img create -q -f qcow2 made 8T"), "MAX_IMAGE_VIRTUAL_SIZE_GB"),
        ("snapshots", factory.changed(&[(60, &huge)]), "snapshots"),
        ("empty", Vec::new(), "empty"),
    ] {
        assert_refused(&node, name, &image, reason).await;
    }
    for size in [4, 8, 71, 72, 100, 103, 104, 111, 112, 0x1_0000, 0x2_0000, whole.len() - 1] {
        assert_refused(&node, &format!("cut to {size}"), &whole[..size], "truncated").await;
    }
    for (name, image, reason) in [
        ("table cut, packed", compressed("xz", &factory.changed(&[(40, &far)])), "beyond the end"),
        ("corrupt, packed", compressed("gzip", &factory.changed(&[(72, &2u64.to_be_bytes())])), "corrupt"),
        ("packed twice", compressed("gzip", &compressed("gzip", &whole)), "compressed twice"),
        ("packed twice, mixed", compressed("xz", &compressed("gzip", &whole)), "compressed twice"),
        ("packed and cut", compressed("gzip", &guest_disk())[..MIB].to_vec(), "cannot be decompressed"),
        ("packed nonsense", b"\x1f\x8b\x08nonsense".to_vec(), "cannot be decompressed"),
        ("xz nonsense", b"\xfd7zXZ\0nonsense".to_vec(), "cannot be decompressed"),
    ] {
        assert_refused(&node, name, &image, reason).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn refuses_truncated_images() {
    let Some(node) = TestNode::real(&[]).await else { return };
    let factory = ImageFactory::new();
    factory.create("base64 disk > made; truncate -s 8M made; mv made text; cp text made");
    for (options, source) in [
        ("", "disk"),
        ("-o compat=0.10", "disk"),
        ("-o cluster_size=4k", "disk"),
        ("-o extended_l2=on", "disk"),
        ("-o preallocation=metadata", "disk"),
        ("-c", "text"),
        ("-c -o cluster_size=4k,compression_type=zstd", "text"),
    ] {
        let whole = factory.create(&format!("qemu-img convert -f raw -O qcow2 {options} {source} made"));
        let blob = node.blob(&whole).await;
        let facts =
            node.storage().inspect("ci", blob).await.unwrap_or_else(|error| panic!("{options:?}: {error}"));
        let number = |at: usize| usize::try_from(u64::from_be_bytes(whole[at..at + 8].try_into().unwrap()));
        let entries = u32::from_be_bytes(whole[36..40].try_into().unwrap()) as usize;
        let behind = number(40).unwrap() + entries * 8;
        let data = whole.len() - behind;
        for size in [behind, behind + 100_000, behind + data / 2, behind + data * 9 / 10, whole.len() - 513] {
            let name = format!("{options:?} cut to {size} of {}", whole.len());
            let cut = node.blob(&whole[..size]).await;
            for refusal in [
                node.storage().inspect("ci", cut).await.map(drop),
                node.storage().convert("ci", cut, &facts).await,
            ] {
                match refusal {
                    Err(Error::Invalid(text)) => assert!(text.contains("truncated"), "{name}: {text}"),
                    other => panic!("{name}: {other:?}"),
                }
            }
        }
    }
    // A disk that ends within a cluster, like its file.
    for options in ["", "-o extended_l2=on", "-c"] {
        let script = "head -c 100352 disk > odd; qemu-img convert -f raw -O qcow2";
        let blob = node.blob(&factory.create(&format!("{script} {options} odd made"))).await;
        let facts =
            node.storage().inspect("ci", blob).await.unwrap_or_else(|error| panic!("{options:?}: {error}"));
        node.storage().convert("ci", blob, &facts).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn refuses_inconsistent_tables() {
    let Some(node) = TestNode::real(&[]).await else { return };
    let factory = ImageFactory::new();
    let whole = factory.create("qemu-img convert -f raw -O qcow2 disk made");
    let table = u64::from_be_bytes(whole[48..56].try_into().unwrap());
    let mut image = whole.clone();
    image[usize::try_from(table).unwrap()..][..8].fill(0);
    let blob = node.blob(&image).await;
    let refused = node.storage().inspect("ci", blob).await;
    assert!(matches!(&refused, Err(Error::Invalid(text)) if text.starts_with("the image is damaged: ")));
    // Leaked clusters are harmless.
    let leaky = [whole, vec![0; MIB]].concat();
    node.storage().inspect("ci", node.blob(&leaky).await).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn refuses_tables_that_map_one_cluster_many_times() {
    let Some(node) = TestNode::real(&[]).await else { return };
    let factory = ImageFactory::new();
    let writes = "-c 'write 0 64k' -c 'write 512M 64k' -c 'write 1G 64k' -c 'write 1536M 64k'";
    let script = format!("qemu-img create -q -f qcow2 made 2G; qemu-io -f qcow2 {writes} made");
    let mut image = factory.create(&script);
    let number =
        |image: &[u8], at: usize| u64::from_be_bytes(image[at..at + 8].try_into().unwrap()) & !(1 << 63);
    let first = usize::try_from(number(&image, 40)).unwrap();
    let tables: Vec<usize> =
        (0..4).map(|table| usize::try_from(number(&image, first + table * 8)).unwrap()).collect();
    let entry = image[tables[0]..tables[0] + 8].to_vec();
    for table in &tables {
        image[*table..*table + (64 << 10)].copy_from_slice(&entry.repeat(8 << 10));
    }
    assert_refused(&node, "one cluster", &image, "far more data").await;
    assert_refused(&node, "one cluster, packed", &compressed("gzip", &image), "far more data").await;
    // A table that is mapped many times is not even read.
    let mut image =
        factory.create("qemu-img create -q -f qcow2 made 2T; qemu-io -f qcow2 -c 'write 0 64k' made");
    let entry_at = usize::try_from(number(&image, 40)).unwrap();
    let own = image[entry_at..entry_at + 8].to_vec();
    image[entry_at..entry_at + 4096 * 8].copy_from_slice(&own.repeat(4096));
    assert_refused(&node, "one table", &image, "tables are larger").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn refuses_other_formats_by_name() {
    let Some(node) = TestNode::real(&[]).await else { return };
    let factory = ImageFactory::new();
    for (format, name) in [
        ("vmdk", "VMDK"),
        ("vhdx", "VHDX"),
        ("vpc", "VHD"),
        ("vdi", "VDI"),
        ("qed", "QED"),
        ("parallels", "Parallels"),
        ("qcow", "QCOW"),
    ] {
        let image = factory.create(&format!("qemu-img create -q -f {format} made 16M"));
        assert_refused(&node, format, &image, &format!("format {name}")).await;
        assert_refused(
            &node,
            &format!("{format}, packed"),
            &compressed("gzip", &image),
            &format!("format {name}"),
        )
        .await;
    }
    let luks = retrying(
        "qemu-img create -q -f luks --object secret,id=s,data=abc123 -o key-secret=s,iter-time=10 made 1M",
    );
    assert_refused(&node, "luks", &factory.create(&luks), "format LUKS").await;
    let secret = factory.path().join("secret").display().to_string();
    let descriptor = format!(
        "# TestNode DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\ncreateType=\"monolithicFlat\"\n\nRW 100 FLAT \"{secret}\" 0\n"
    );
    assert_refused(&node, "descriptor", descriptor.as_bytes(), "VMDK").await;
    let bare = descriptor.replace("# TestNode DescriptorFile\n", "#\n\n");
    assert_refused(&node, "descriptor without its title", bare.as_bytes(), "VMDK").await;
    let split = factory.create("qemu-img create -q -f vmdk -o subformat=twoGbMaxExtentSparse made 16M");
    assert_refused(&node, "split", &split, "VMDK").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn refuses_nested_images() {
    let Some(node) = TestNode::real(&[]).await else { return };
    let factory = ImageFactory::new();
    let secret = factory.path().join("secret").display().to_string();
    for (name, inner) in [
        ("inside: qcow2", format!("qemu-img create -q -f qcow2 -b {secret} -F raw inner")),
        ("inside: vmdk", "qemu-img create -q -f vmdk inner 1M".to_owned()),
    ] {
        // The outer image contains the path of the secret file, but never its content.
        let image =
            factory.create(&format!("rm -f inner; {inner}; qemu-img convert -f raw -O qcow2 inner made"));
        assert_refused(&node, name, &image, "contains another image").await;
        assert_refused(
            &node,
            &format!("{name}, packed"),
            &compressed("xz", &image),
            "contains another image",
        )
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn refuses_decompression_bombs() {
    let Some(node) = TestNode::real(&[("MAX_IMAGE_SIZE_GB", "0.0625")]).await else { return };
    let factory = ImageFactory::new();
    let gzip = factory.create("head -c 100M /dev/zero | gzip -1 > made");
    let xz = factory.create("head -c 100M /dev/zero | xz -0 > made");
    for (name, image) in [("gzip", gzip), ("xz", xz)] {
        assert_refused(&node, name, &image, "larger than allowed after decompression").await;
    }
    let large = factory.create("truncate -s 65M made");
    assert_refused(&node, "large", &large, "MAX_IMAGE_SIZE_GB").await;
}
