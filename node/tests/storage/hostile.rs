//! Images that somebody made to harm: each is refused with its reason, and none gets at a file of the host.

use std::fs;
use std::path::Path;

use muster_types::Error;
use muster_types::blob::{ImageFacts, ImageFormat};
use muster_types::ids::BlobId;

use crate::images::{guest_disk, packed};
use crate::world::{Disk, MIB, sh};

const SECRET: &str = "the-secret-of-the-host-5f1c";

/// A file of the host that no image may get at, and the place where images are made.
struct Workshop {
    folder: tempfile::TempDir,
}

impl Workshop {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("secret"), SECRET.repeat(1000)).unwrap();
        fs::write(folder.path().join("disk"), guest_disk()).unwrap();
        Self { folder }
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    /// What a script makes of a file called `made`.
    fn made(&self, script: &str) -> Vec<u8> {
        sh(&format!("cd {}; rm -f made; {script}", self.path().display()));
        fs::read(self.path().join("made")).unwrap()
    }

    /// A good image, with something written over it.
    fn changed(&self, changes: &[(usize, &[u8])]) -> Vec<u8> {
        let mut image = self.made("qemu-img create -q -f qcow2 made 64M");
        for (at, value) in changes {
            image[*at..at + value.len()].copy_from_slice(value);
        }
        image
    }

    /// An image with a backing file of this name, put there by hand.
    fn backed_by(&self, name: &str) -> Vec<u8> {
        let (at, length) = (0x200u64.to_be_bytes(), u32::try_from(name.len()).unwrap().to_be_bytes());
        self.changed(&[(8, &at), (16, &length), (0x200, name.as_bytes())])
    }
}

async fn refused(disk: &Disk, name: &str, image: &[u8], reason: &str) {
    let (draft, blob) = (disk.draft(image).await, BlobId::new());
    disk.storage().keep(draft, blob).await.unwrap();
    let refusal = match disk.storage().inspect(blob).await {
        Err(Error::Invalid(text)) => text,
        other => panic!("{name}: {other:?}"),
    };
    assert!(refusal.contains(reason), "{name}: {refusal}");
    assert!(!refusal.contains('/') && !refusal.contains(SECRET), "{name}: {refusal}");
    // Nor is it converted, whatever was said of it before.
    for format in [ImageFormat::Qcow2, ImageFormat::Raw] {
        let facts =
            ImageFacts { format, packing: None, virtual_size: 64 << 20, further: serde_json::Map::new() };
        let result = disk.storage().convert(blob, &facts).await;
        let inner = name.starts_with("inside");
        assert!(inner || matches!(result, Err(Error::Invalid(_))), "{name}: {result:?}");
    }
    let leaks = sh(&format!("grep -rlF {SECRET} {} || true", disk.folder.display()));
    assert_eq!(leaks, "", "{name}");
    disk.storage().remove(blob).await.unwrap();
    disk.storage().remove_draft(draft).await.unwrap();
    assert_eq!(disk.files(), [] as [std::path::PathBuf; 0], "{name}");
}

/// The same command until it works: making a key measures the processor's time, which fails now and then.
fn patiently(command: &str) -> String {
    format!("for _ in 1 2 3 4 5 6 7 8 9; do {command} && break; rm -f made; done; test -s made")
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_that_refers_to_another_file_is_refused() {
    let Some(disk) = Disk::real(&[]).await else { return };
    let shop = Workshop::new();
    let secret = shop.path().join("secret").display().to_string();
    let json = format!(r#"json:{{"driver":"raw","file":{{"driver":"file","filename":"{secret}"}}}}"#);
    let backing = "backing file, which could be any file of the host";
    for (name, image) in [
        ("made", shop.made(&format!("qemu-img create -q -f qcow2 -b {secret} -F raw made"))),
        ("by hand", shop.backed_by(&secret)),
        ("json", shop.backed_by(&json)),
        ("network", shop.backed_by("nbd://127.0.0.1/x")),
        ("chain", shop.made("qemu-img create -q -f qcow2 a 1M; qemu-img create -q -f qcow2 -b a -F qcow2 b; qemu-img create -q -f qcow2 -b b -F qcow2 made")),
        ("itself", shop.backed_by("/in")),
        ("old", shop.made(&format!("qemu-img create -q -f qcow2 -o compat=0.10 -b {secret} -F raw made"))),
    ] {
        refused(&disk, name, &image, backing).await;
        refused(&disk, &format!("{name}, packed"), &packed("gzip", &image), backing).await;
    }
    let external = shop.made("qemu-img create -q -f qcow2 -o data_file=data made 1M");
    refused(&disk, "external", &external, "data in another file").await;
    let raw = shop.made("qemu-img create -q -f qcow2 -o data_file=data,data_file_raw=on made 1M");
    refused(&disk, "external, raw", &raw, "data in another file").await;
    let mut hidden = external;
    hidden[79] = 0;
    refused(&disk, "external without its mark", &hidden, "names another file").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_with_an_absurd_header_is_refused() {
    let Some(disk) = Disk::real(&[]).await else { return };
    let shop = Workshop::new();
    let whole = shop.changed(&[]);
    let huge = u32::MAX.to_be_bytes();
    let far = (1u64 << 40).to_be_bytes();
    let secret = patiently(
        "qemu-img create -q -f qcow2 --object secret,id=s,data=abc123 -o encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10 made 1M",
    );
    for (name, image, reason) in [
        ("huge table", shop.changed(&[(36, &huge)]), "larger than any disk"),
        ("table beyond the end", shop.changed(&[(40, &far)]), "beyond its end"),
        ("references beyond the end", shop.changed(&[(48, &far)]), "beyond its end"),
        ("corrupt", shop.changed(&[(72, &2u64.to_be_bytes())]), "corrupt"),
        ("unknown feature", shop.changed(&[(72, &(1u64 << 63).to_be_bytes())]), "not known"),
        ("encrypted", shop.made(&secret), "encrypted"),
        ("encrypted the old way", shop.changed(&[(32, &1u32.to_be_bytes())]), "encrypted"),
        ("16 EiB", shop.changed(&[(24, &u64::MAX.to_be_bytes())]), "too small for its disk"),
        ("no size", shop.changed(&[(24, &[0; 8])]), "no size"),
        ("8 TiB", shop.made("qemu-img create -q -f qcow2 made 8T"), "MAX_IMAGE_VIRTUAL_SIZE_GB"),
        ("snapshots", shop.changed(&[(60, &huge)]), "snapshots"),
        ("empty", Vec::new(), "empty"),
    ] {
        refused(&disk, name, &image, reason).await;
    }
    for size in [4, 8, 71, 72, 100, 103, 104, 111, 112, 0x1_0000, 0x2_0000, whole.len() - 1] {
        refused(&disk, &format!("cut to {size}"), &whole[..size], "cut off").await;
    }
    for (name, image, reason) in [
        ("table cut, packed", packed("xz", &shop.changed(&[(40, &far)])), "beyond its end"),
        ("corrupt, packed", packed("gzip", &shop.changed(&[(72, &2u64.to_be_bytes())])), "corrupt"),
        ("packed twice", packed("gzip", &packed("gzip", &whole)), "packed twice"),
        ("packed twice, mixed", packed("xz", &packed("gzip", &whole)), "packed twice"),
        ("packed and cut", packed("gzip", &guest_disk())[..MIB].to_vec(), "cannot be unpacked"),
        ("packed nonsense", b"\x1f\x8b\x08nonsense".to_vec(), "cannot be unpacked"),
        ("xz nonsense", b"\xfd7zXZ\0nonsense".to_vec(), "cannot be unpacked"),
    ] {
        refused(&disk, name, &image, reason).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_that_is_cut_off_within_its_data_is_refused() {
    let Some(disk) = Disk::real(&[]).await else { return };
    let shop = Workshop::new();
    shop.made("base64 disk > made; truncate -s 8M made; mv made text; cp text made");
    for (options, source) in [
        ("", "disk"),
        ("-o compat=0.10", "disk"),
        ("-o cluster_size=4k", "disk"),
        ("-o extended_l2=on", "disk"),
        ("-o preallocation=metadata", "disk"),
        ("-c", "text"),
        ("-c -o cluster_size=4k,compression_type=zstd", "text"),
    ] {
        let whole = shop.made(&format!("qemu-img convert -f raw -O qcow2 {options} {source} made"));
        let blob = disk.blob(&whole).await;
        let facts = disk.storage().inspect(blob).await.unwrap_or_else(|error| panic!("{options:?}: {error}"));
        let number = |at: usize| usize::try_from(u64::from_be_bytes(whole[at..at + 8].try_into().unwrap()));
        let entries = u32::from_be_bytes(whole[36..40].try_into().unwrap()) as usize;
        let behind = number(40).unwrap() + entries * 8;
        let data = whole.len() - behind;
        for size in [behind, behind + 100_000, behind + data / 2, behind + data * 9 / 10, whole.len() - 513] {
            let name = format!("{options:?} cut to {size} of {}", whole.len());
            let cut = disk.blob(&whole[..size]).await;
            for refusal in
                [disk.storage().inspect(cut).await.map(drop), disk.storage().convert(cut, &facts).await]
            {
                match refusal {
                    Err(Error::Invalid(text)) => assert!(text.contains("cut off"), "{name}: {text}"),
                    other => panic!("{name}: {other:?}"),
                }
            }
        }
    }
    // A disk that ends within a cluster, and a file that ends there, too.
    for options in ["", "-o extended_l2=on", "-c"] {
        let script = "head -c 100352 disk > odd; qemu-img convert -f raw -O qcow2";
        let blob = disk.blob(&shop.made(&format!("{script} {options} odd made"))).await;
        let facts = disk.storage().inspect(blob).await.unwrap_or_else(|error| panic!("{options:?}: {error}"));
        disk.storage().convert(blob, &facts).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_whose_tables_contradict_each_other_is_refused() {
    let Some(disk) = Disk::real(&[]).await else { return };
    let shop = Workshop::new();
    let whole = shop.made("qemu-img convert -f raw -O qcow2 disk made");
    let table = u64::from_be_bytes(whole[48..56].try_into().unwrap());
    let mut image = whole.clone();
    image[usize::try_from(table).unwrap()..][..8].fill(0);
    let blob = disk.blob(&image).await;
    let refused = disk.storage().inspect(blob).await;
    assert!(matches!(&refused, Err(Error::Invalid(text)) if text.starts_with("the image is damaged: ")));
    // Clusters that nothing refers to harm nobody.
    let leaky = [whole, vec![0; MIB]].concat();
    disk.storage().inspect(disk.blob(&leaky).await).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_that_shows_one_cluster_everywhere_is_refused() {
    let Some(disk) = Disk::real(&[]).await else { return };
    let shop = Workshop::new();
    let writes = "-c 'write 0 64k' -c 'write 512M 64k' -c 'write 1G 64k' -c 'write 1536M 64k'";
    let script = format!("qemu-img create -q -f qcow2 made 2G; qemu-io -f qcow2 {writes} made");
    let mut image = shop.made(&script);
    let number =
        |image: &[u8], at: usize| u64::from_be_bytes(image[at..at + 8].try_into().unwrap()) & !(1 << 63);
    let first = usize::try_from(number(&image, 40)).unwrap();
    let tables: Vec<usize> =
        (0..4).map(|table| usize::try_from(number(&image, first + table * 8)).unwrap()).collect();
    let entry = image[tables[0]..tables[0] + 8].to_vec();
    for table in &tables {
        image[*table..*table + (64 << 10)].copy_from_slice(&entry.repeat(8 << 10));
    }
    refused(&disk, "one cluster", &image, "far more data").await;
    refused(&disk, "one cluster, packed", &packed("gzip", &image), "far more data").await;
    // One table everywhere is not even walked through.
    let mut image = shop.made("qemu-img create -q -f qcow2 made 2T; qemu-io -f qcow2 -c 'write 0 64k' made");
    let entry_at = usize::try_from(number(&image, 40)).unwrap();
    let own = image[entry_at..entry_at + 8].to_vec();
    image[entry_at..entry_at + 4096 * 8].copy_from_slice(&own.repeat(4096));
    refused(&disk, "one table", &image, "tables are larger").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn images_of_other_formats_are_refused_by_name() {
    let Some(disk) = Disk::real(&[]).await else { return };
    let shop = Workshop::new();
    for (format, name) in [
        ("vmdk", "VMDK"),
        ("vhdx", "VHDX"),
        ("vpc", "VHD"),
        ("vdi", "VDI"),
        ("qed", "QED"),
        ("parallels", "Parallels"),
        ("qcow", "QCOW"),
    ] {
        let image = shop.made(&format!("qemu-img create -q -f {format} made 16M"));
        refused(&disk, format, &image, &format!("format {name}")).await;
        refused(&disk, &format!("{format}, packed"), &packed("gzip", &image), &format!("format {name}"))
            .await;
    }
    let luks = patiently(
        "qemu-img create -q -f luks --object secret,id=s,data=abc123 -o key-secret=s,iter-time=10 made 1M",
    );
    refused(&disk, "luks", &shop.made(&luks), "format LUKS").await;
    let secret = shop.path().join("secret").display().to_string();
    let descriptor = format!(
        "# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\ncreateType=\"monolithicFlat\"\n\nRW 100 FLAT \"{secret}\" 0\n"
    );
    refused(&disk, "descriptor", descriptor.as_bytes(), "VMDK").await;
    let bare = descriptor.replace("# Disk DescriptorFile\n", "#\n\n");
    refused(&disk, "descriptor without its title", bare.as_bytes(), "VMDK").await;
    let split = shop.made("qemu-img create -q -f vmdk -o subformat=twoGbMaxExtentSparse made 16M");
    refused(&disk, "split", &split, "VMDK").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_inside_an_image_is_refused() {
    let Some(disk) = Disk::real(&[]).await else { return };
    let shop = Workshop::new();
    let secret = shop.path().join("secret").display().to_string();
    for (name, inner) in [
        ("inside: qcow2", format!("qemu-img create -q -f qcow2 -b {secret} -F raw inner")),
        ("inside: vmdk", "qemu-img create -q -f vmdk inner 1M".to_owned()),
    ] {
        // The inner one's name of the secret's file is in the outer one, but never what is in that file.
        let image = shop.made(&format!("rm -f inner; {inner}; qemu-img convert -f raw -O qcow2 inner made"));
        refused(&disk, name, &image, "an image inside").await;
        refused(&disk, &format!("{name}, packed"), &packed("xz", &image), "an image inside").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_unpacks_to_far_too_much_is_refused_early() {
    let Some(disk) = Disk::real(&[("MAX_IMAGE_SIZE_GB", "0.0625")]).await else { return };
    let shop = Workshop::new();
    let gzip = shop.made("head -c 100M /dev/zero | gzip -1 > made");
    let xz = shop.made("head -c 100M /dev/zero | xz -0 > made");
    for (name, image) in [("gzip", gzip), ("xz", xz)] {
        refused(&disk, name, &image, "larger than is allowed when it is unpacked").await;
    }
    let large = shop.made("truncate -s 65M made");
    refused(&disk, "large", &large, "MAX_IMAGE_SIZE_GB").await;
}
